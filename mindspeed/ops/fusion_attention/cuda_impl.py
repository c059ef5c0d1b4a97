"""fusion_attention on CUDA by torch's own kernels, chosen by shape; the reference for the rest.

Run without a mask tensor: no mask, the causal modes, the bands and packed documents, in half
precision. A position bias, an arbitrary mask and prefixes need the scores: the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed.ops.fusion_attention import flash4, reference, sdpa
from mindspeed.ops.fusion_attention.reference import (
    Options,
    Results,
    band,
    documents,
    dropout_size,
    from_heads_first,
    heads_first,
    repeat_statistic,
)


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any
) -> Results:
    """Compute attention; the keyword arguments are the fields of `Options`."""
    given = Options(**options)
    result = None
    if given.pse is None and input_layout == "TND":
        result = _packed(query, key, value, given)
    elif given.pse is None:
        size = query.shape[-1] // (head_num if input_layout in ("BSH", "SBH") else 1)
        q, k, v = (heads_first(x, input_layout, size) for x in (query, key, value))
        result = _dense(q, k, v, given)
    if result is None:
        return reference.fusion_attention(query, key, value, head_num, input_layout, **options)
    out, lse = result
    out = out if input_layout == "TND" else from_heads_first(out, input_layout)
    numbers = dropout_size(query, key, head_num, input_layout, given)
    ones = torch.ones_like(lse)
    return out, repeat_statistic(lse), repeat_statistic(ones), query.new_empty(0), 0, 0, numbers


def _dense(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor] | None:
    is_square = q.shape[-2] == k.shape[-2]
    window = _window(options, q.shape[-2], k.shape[-2], is_square)
    if window is None or q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        return None
    is_causal, dropout = window == (-1, 0), 1.0 - options.keep_prob
    is_plain = window == (-1, -1) or (is_causal and is_square)
    is_nondeterministic = not torch.are_deterministic_algorithms_enabled()
    is_long = is_plain and sdpa.prefers_cudnn(q, k, v)
    if is_long and flash4.supports(q, k, v, is_causal, dropout):
        return flash4.attention_lse(q, k, v, options.scale, is_causal)
    if is_long and is_nondeterministic:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, dropout, is_causal, False, scale=options.scale
        )
        return found[0], found[1].reshape(q.shape[:-1])
    if not sdpa.supports_flash(q, k, v):
        return None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = sdpa.flash_attention_lse(
        q, k, v, scale=options.scale, dropout=dropout, window=window
    )
    return out.transpose(1, 2), lse


def _packed(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor] | None:
    ends = options.actual_seq_qlen or (), options.actual_seq_kvlen or ()
    slices = [documents(bounds) for bounds in ends]
    lengths = [[part.stop - part.start for part in parts] for parts in slices]
    is_whole = all(parts and parts[-1].stop == len(x) for parts, x in zip(slices, (q, k)))
    if not (is_whole and min(lengths[1]) and sdpa.supports_flash(q, k, v)):
        return None
    longest = max(lengths[0]), max(lengths[1])
    window = _window(options, *longest, lengths[0] == lengths[1])
    if window is None:
        return None
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor([0, *(part.stop for part in parts)], dtype=torch.int32, device=q.device)
        for parts in slices
    )
    out, lse = sdpa.flash_attention_lse(
        q,
        k,
        v,
        scale=options.scale,
        dropout=1.0 - options.keep_prob,
        window=window,
        documents=sdpa.Documents(cu_seqlens_q, cu_seqlens_k, *longest),
    )
    return out, lse.transpose(0, 1)


def _window(options: Options, num_q: int, num_k: int, is_square: bool) -> tuple[int, int] | None:
    """Return the keys left and right of a query, -1 for all; None where a mask is needed."""
    mode = options.sparse_mode
    if options.atten_mask is None:
        return -1, -1
    edges = band(options, num_q, num_k, mode) if mode in (2, 3, 4) else None
    # Flash attention aligns the last query to the last key, as modes 3 and 4 do.
    if edges is None or min(edges[:2]) < 0 or (mode == 2 and not is_square):
        return None
    left, right, _ = edges
    return (-1 if left >= num_q + num_k else left), (-1 if right >= num_k else right)
