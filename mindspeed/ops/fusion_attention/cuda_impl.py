"""fusion_attention on CUDA by torch's own kernels, chosen by shape; the reference for the rest.

Served without a mask tensor: no mask, the causal modes, the bands and packed documents, in half
precision. A position bias, an arbitrary mask and prefixes need the scores: the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed.ops.fusion_attention import flash4, reference, sdpa
from mindspeed.ops.fusion_attention.contract import Options, Results
from mindspeed.ops.fusion_attention.layout import (
    as_given,
    copied,
    documents,
    dropped_numbers,
    heads_first,
)
from mindspeed.ops.fusion_attention.masks import band


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any
) -> Results:
    """Attend; the keywords are those of `contract.Options`."""
    given = Options(**options)
    found = None
    if given.pse is None and input_layout == "TND":
        found = _packed(query, key, value, given)
    elif given.pse is None:
        size = query.shape[-1] // (head_num if input_layout in ("BSH", "SBH") else 1)
        q, k, v = (heads_first(x, input_layout, size) for x in (query, key, value))
        found = _dense(q, k, v, given)
    if found is None:
        return reference.fusion_attention(query, key, value, head_num, input_layout, **options)
    out, lse = found
    out = out if input_layout == "TND" else as_given(out, input_layout)
    numbers = dropped_numbers(query, key, head_num, input_layout, given)
    ones = torch.ones_like(lse)
    return out, copied(lse), copied(ones), query.new_empty(0), 0, 0, numbers


def _dense(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor] | None:
    is_square = q.shape[-2] == k.shape[-2]
    window = _window(options, q.shape[-2], k.shape[-2], is_square)
    if window is None or q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        return None
    is_causal, dropout = window == (-1, 0), 1.0 - options.keep_prob
    is_plain = window == (-1, -1) or (is_causal and is_square)
    is_free = not torch.are_deterministic_algorithms_enabled()
    is_long = is_plain and sdpa.prefers_cudnn(q, k, v)
    if is_long and flash4.serves(q, k, v, is_causal, dropout):
        return flash4.attention_lse(q, k, v, options.scale, is_causal)
    if is_long and is_free:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, dropout, is_causal, False, scale=options.scale
        )
        return found[0], found[1].reshape(q.shape[:-1])
    if not sdpa.serves_flash(q, k, v):
        return None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    how = {"scale": options.scale, "dropout": dropout, "window": window}
    out, lse = sdpa.flash_attention_lse(q, k, v, **how)
    return out.transpose(1, 2), lse


def _packed(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor] | None:
    places = [documents(b or ()) for b in (options.actual_seq_qlen, options.actual_seq_kvlen)]
    lengths = [[place.stop - place.start for place in of] for of in places]
    is_whole = all(of and of[-1].stop == len(x) for of, x in zip(places, (q, k)))
    if not (is_whole and min(lengths[1]) and sdpa.serves_flash(q, k, v)):
        return None
    longest = max(lengths[0]), max(lengths[1])
    window = _window(options, *longest, lengths[0] == lengths[1])
    if window is None:
        return None
    bounds = (
        torch.tensor([0, *(place.stop for place in of)], dtype=torch.int32, device=q.device)
        for of in places
    )
    how = {"scale": options.scale, "dropout": 1.0 - options.keep_prob, "window": window}
    packed = sdpa.Documents(*bounds, *longest)
    out, lse = sdpa.flash_attention_lse(q, k, v, documents=packed, **how)
    return out, lse.transpose(0, 1)


def _window(options: Options, num_q: int, num_k: int, is_square: bool) -> tuple[int, int] | None:
    """Return the keys seen left and right of a query, -1 for all; None where it takes a mask."""
    mode = options.sparse_mode
    if options.atten_mask is None:
        return -1, -1
    edges = band(options, num_q, num_k, mode) if mode in (2, 3, 4) else None
    # Flash attention puts the last query at the last key, as modes 3 and 4 do.
    if edges is None or min(edges[:2]) < 0 or (mode == 2 and not is_square):
        return None
    left, right, _ = edges
    return (-1 if left >= num_q + num_k else left), (-1 if right >= num_k else right)
