"""fusion_attention in plain torch, with the whole matrix of scores.

out = dropout(softmax(mask(scale * q k^T + pse))) v in float32 at least, in the dtype of the query.
A query that sees no key gets zeros.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops.fusion_attention.contract import Options, Results
from mindspeed.ops.fusion_attention.layout import (
    as_given,
    copied,
    documents,
    dropped_numbers,
    heads_first,
)
from mindspeed.ops.fusion_attention.masks import mode_of, position_bias, visible


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any
) -> Results:
    """Attend; the keywords are those of `contract.Options`."""
    given = Options(**options)
    if input_layout == "TND":
        out, largest, total = _attend_documents(query, key, value, given)
    else:
        size = query.shape[-1] // head_num if input_layout in ("BSH", "SBH") else query.shape[-1]
        groups = key.shape[-1] // size if input_layout in ("BSH", "SBH") else None
        size_v = value.shape[-1] if groups is None else value.shape[-1] // groups
        q, k = (heads_first(x, input_layout, size) for x in (query, key))
        v = heads_first(value, input_layout, size_v)
        out, largest, total = attend(q, k, v, given, given.sparse_mode)
        out = as_given(out, input_layout)
    numbers = dropped_numbers(query, key, head_num, input_layout, given)
    return out, copied(largest), copied(total), query.new_empty(0), 0, 0, numbers


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, mode: int, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend (B, N, S, D) tensors; return out, and the largest score and sum of each row."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * options.scale
    bias = position_bias(q, k, options, wide)
    scores = scores if bias is None else scores + bias
    seen = visible(q, k, options, mode, first)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    # The least number stands for a row without keys: its exponentials are all zero.
    least = torch.finfo(wide).min
    if k.shape[-2]:
        largest = scores.detach().amax(-1, keepdim=True).clamp_min(least)
    else:
        largest = scores.new_full((*scores.shape[:-1], 1), least)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total > 0, total, 1.0)
    if options.keep_prob < 1.0:
        kept = torch.rand(weights.shape, device=weights.device) < options.keep_prob
        weights = weights * kept / options.keep_prob
    out = (weights @ v.to(wide)).to(q.dtype)
    return out, largest.squeeze(-1), total.detach().squeeze(-1)


def _attend_documents(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    places = [documents(b) for b in (options.actual_seq_qlen or (), options.actual_seq_kvlen or ())]
    pieces = []
    for number, (rows, columns) in enumerate(zip(*places, strict=True)):
        each = (x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[columns], v[columns]))
        of_one = replace(options, pse=_of_document(options.pse, number))
        mode = mode_of(options, number, len(places[0]))
        found = attend(*each, of_one, mode, number)
        pieces.append([x.squeeze(0).transpose(0, 1) for x in found])
    rest = q.shape[0] - sum(len(piece[0]) for piece in pieces)
    heads = q.shape[1]
    pieces.append([v.new_zeros(rest, heads, v.shape[-1]), *(q.new_zeros(rest, heads),) * 2])
    return tuple(torch.cat(parts) for parts in zip(*pieces))


def _of_document(pse: Tensor | None, number: int) -> Tensor | None:
    if pse is None or pse.dim() < 4 or pse.shape[0] == 1:
        return pse
    return pse[number : number + 1]
