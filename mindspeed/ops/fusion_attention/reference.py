"""fusion_attention in plain torch, with the whole matrix of scores; what it accepts and returns.

B batch, S sequence, N heads, D head size, T tokens of all packed documents.

out = dropout(softmax(mask(scale * q k^T + pse))) v in float32 at lowest, in the dtype of the query.
A query that attends to no key gets zeros.

Seven results: out, two statistics (B, N, S, 8) or (T, N, 8) in float32, each number eight times, an
empty tensor, and three integers: seed and offset of an NPU's dropout (0 elsewhere) and its size.
The sum of the exponentials of a row is exp(softmax_max) * softmax_sum: a backend that computes the
log-sum-exp returns it as the first, and 1 as the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
ALL = 2147483647  # tokens
COPIES = 8  # of each statistic
Results = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]
_ORDER = {"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
Band = tuple[int, int, int]
"""Keys before and after a query that it attends to, and the key to which query 0 is aligned."""


@dataclass(frozen=True)
class Options:
    """The keyword arguments of fusion_attention.

    sparse_mode selects the keys of a query: 0 those of atten_mask within the band from pre_tokens
    before it to next_tokens after it, 1 those of atten_mask, 2 causal with the first query aligned
    to the first key, 3 causal with the last query aligned to the last key, 4 the band with the last
    query aligned to the last key, 5 and 6 mode 3 and the first `prefix` keys, 7 mode 3 with the
    last document in mode 4, 8 mode 2 with the first document in mode 4. Modes 2 to 8 ignore the
    values of atten_mask; it only has to be given.
    pse_type: 1 adds pse before the scale, 0 after it; 2 and 3 compute it from one slope per head,
    minus slope times the distance or its square root.
    """

    pse: Tensor | None = None
    padding_mask: Tensor | None = None
    atten_mask: Tensor | None = None
    scale: float = 1.0
    keep_prob: float = 1.0
    pre_tokens: int = ALL
    next_tokens: int = ALL
    inner_precise: int = 0
    prefix: Sequence[int] | None = None
    actual_seq_qlen: Sequence[int] | None = None
    actual_seq_kvlen: Sequence[int] | None = None
    sparse_mode: int = 0
    gen_mask_parallel: bool = True
    sync: bool = False
    pse_type: int = 1
    q_start_idx: Sequence[int] | None = None
    kv_start_idx: Sequence[int] | None = None


NAMES = frozenset(field.name for field in fields(Options))


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any
) -> Results:
    """Compute attention; the keyword arguments are the fields of `Options`."""
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
        out = from_heads_first(out, input_layout)
    numbers = dropout_size(query, key, head_num, input_layout, given)
    return (
        out,
        repeat_statistic(largest),
        repeat_statistic(total),
        query.new_empty(0),
        0,
        0,
        numbers,
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, mode: int, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of (B, N, S, D) tensors, and the maximum and sum of each row of scores."""
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q.to(acc_dtype) @ k.to(acc_dtype).transpose(-1, -2) * options.scale
    bias = _position_bias(q, k, options, acc_dtype)
    scores = scores if bias is None else scores + bias
    allowed = attention_mask(q, k, options, mode, first)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    # The lowest finite maximum for a row without keys: its exponentials are all zero.
    lowest = torch.finfo(acc_dtype).min
    if k.shape[-2]:
        largest = scores.detach().amax(-1, keepdim=True).clamp_min(lowest)
    else:
        largest = scores.new_full((*scores.shape[:-1], 1), lowest)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total > 0, total, 1.0)
    if options.keep_prob < 1.0:
        kept = torch.rand(weights.shape, device=weights.device) < options.keep_prob
        weights = weights * kept / options.keep_prob
    out = (weights @ v.to(acc_dtype)).to(q.dtype)
    return out, largest.squeeze(-1), total.detach().squeeze(-1)


def _attend_documents(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    ends = options.actual_seq_qlen or (), options.actual_seq_kvlen or ()
    slices = [documents(bounds) for bounds in ends]
    pieces = []
    for number, (rows, columns) in enumerate(zip(*slices, strict=True)):
        each = [x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[columns], v[columns])]
        own = replace(options, pse=_document_pse(options.pse, number))
        mode = document_mode(options, number, len(slices[0]))
        results = attend(each[0], each[1], each[2], own, mode, number)
        pieces.append([x.squeeze(0).transpose(0, 1) for x in results])
    rest = q.shape[0] - sum(len(piece[0]) for piece in pieces)
    heads = q.shape[1]
    pieces.append([v.new_zeros(rest, heads, v.shape[-1]), *(q.new_zeros(rest, heads),) * 2])
    out, largest, total = (torch.cat(parts) for parts in zip(*pieces))
    return out, largest, total


def _document_pse(pse: Tensor | None, number: int) -> Tensor | None:
    if pse is None or pse.dim() < 4 or pse.shape[0] == 1:
        return pse
    return pse[number : number + 1]


def band(options: Options, num_q: int, num_k: int, mode: int) -> Band | None:
    """Return the band of keys of a mode, None where it has none."""
    below, above = options.pre_tokens, options.next_tokens
    if mode == 0:
        return (below, above, 0)
    if mode == 2:
        return (num_q + num_k, 0, 0)
    if mode in (3, 5, 6):
        return (num_q + num_k, 0, num_k - num_q)
    return (below, above, num_k - num_q) if mode == 4 else None


def document_mode(options: Options, document: int, count: int) -> int:
    """Return the mode of one document: 7 and 8 treat the last and the first differently."""
    mode = options.sparse_mode
    if mode == 7:
        return 4 if document == count - 1 else 3
    if mode == 8:
        return 4 if document == 0 else 2
    return mode


def attention_mask(
    q: Tensor, k: Tensor, options: Options, mode: int, first: int = 0
) -> Tensor | None:
    """Return the mask (True = attend) of (B, N, S, D) queries, broadcast to (B, N, S, S), or None.

    `first` is the index of the first sequence in options.prefix.
    """
    mask = options.atten_mask
    if mask is None:
        return None
    num_q, num_k = q.shape[-2], k.shape[-2]
    allowed = None
    edges = band(options, num_q, num_k, mode)
    if edges is not None:
        below, above, start = edges
        distance = torch.arange(num_k, device=q.device) - start
        distance = distance - torch.arange(num_q, device=q.device).unsqueeze(1)
        allowed = (distance <= above) & (distance >= -below)
    if mode in (0, 1):
        given = ~mask.bool()[..., :num_q, :num_k]
        allowed = given if allowed is None else allowed & given
    if mode in (5, 6) and options.prefix is not None:
        lengths = torch.tensor(list(options.prefix), device=q.device)[first : first + len(q)]
        in_prefix = torch.arange(num_k, device=q.device) < lengths.view(-1, 1, 1, 1)
        allowed = in_prefix if allowed is None else allowed | in_prefix
    return allowed


def _position_bias(q: Tensor, k: Tensor, options: Options, acc_dtype: torch.dtype) -> Tensor | None:
    """Return the bias that is added to the scaled scores, broadcast to (B, N, S, S)."""
    pse = options.pse
    if pse is None:
        return None
    if options.pse_type in (0, 1):
        if pse.shape[-2] not in (1, q.shape[-2]):
            raise ValueError(f"pse of shape {tuple(pse.shape)} must have 1 or {q.shape[-2]} rows")
        return pse.to(acc_dtype) * (options.scale if options.pse_type == 1 else 1.0)
    starts = ((given or [0])[0] for given in (options.q_start_idx, options.kv_start_idx))
    of_q, of_k = (
        torch.arange(x.shape[-2], device=q.device) + start for x, start in zip((q, k), starts)
    )
    distance = (of_q.unsqueeze(1) - of_k).abs().to(acc_dtype)
    distance = distance.sqrt() if options.pse_type == 3 else distance
    return -pse.to(acc_dtype).reshape(-1, q.shape[1], 1, 1) * distance


def heads_first(x: Tensor, layout: str, head_size: int) -> Tensor:
    """View x as (B, N, S, D)."""
    if layout in ("BSH", "SBH"):
        x = x.unflatten(-1, (-1, head_size))
    return x.permute(_ORDER[layout])


def from_heads_first(x: Tensor, layout: str) -> Tensor:
    """View (B, N, S, D) in the layout again."""
    order = _ORDER[layout]
    x = x.permute([order.index(dim) for dim in range(4)])
    return x.flatten(2) if layout in ("BSH", "SBH") else x


def documents(bounds: Sequence[int]) -> list[slice]:
    """Return the slice of each document; zeros at the end are documents left out."""
    ends = [int(end) for end in bounds]
    while ends and not ends[-1]:
        ends.pop()
    return [slice(start, end) for start, end in pairwise([0, *ends])]


def repeat_statistic(statistic: Tensor) -> Tensor:
    """Repeat one number per row eight times, as the kernels of an NPU do."""
    return statistic.to(torch.float32).unsqueeze(-1).expand(*statistic.shape, COPIES).contiguous()


def dropout_size(query: Tensor, key: Tensor, head_num: int, layout: str, options: Options) -> int:
    """Return the number of scores that dropout is applied to; 0 without dropout."""
    if options.keep_prob == 1.0:
        return 0
    if layout != "TND":
        batch, length = layout.index("B"), layout.index("S")
        return query.shape[batch] * head_num * query.shape[length] * key.shape[length]
    bounds = options.actual_seq_qlen or (), options.actual_seq_kvlen or ()
    sizes = ([part.stop - part.start for part in documents(ends)] for ends in bounds)
    return head_num * sum(rows * columns for rows, columns in zip(*sizes))


def check(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any
) -> None:
    """Raise ValueError for arguments that no implementation supports."""
    unknown = [name for name in options if name not in NAMES]
    if unknown:
        raise TypeError(f"fusion_attention got unknown arguments {', '.join(sorted(unknown))}")
    if input_layout not in LAYOUTS:
        raise ValueError(f"input_layout={input_layout}: use {', '.join(LAYOUTS)}")
    given = Options(**options)
    _check_heads(query, key, value, head_num, input_layout)
    _check_masks(given, input_layout)
    if given.padding_mask is not None:
        raise ValueError("padding_mask is not supported: give atten_mask")
    if not 0.0 < given.keep_prob <= 1.0:
        raise ValueError(f"keep_prob={given.keep_prob}: use a probability above 0, up to 1")
    if given.pse_type not in (0, 1, 2, 3):
        raise ValueError(f"pse_type={given.pse_type}: use 0, 1, 2 or 3")


def _check_heads(query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str) -> None:
    if query.dim() != len(layout):
        raise ValueError(f"input_layout={layout} and query of shape {tuple(query.shape)}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key, value have types {query.dtype}, {key.dtype}, {value.dtype}")
    dim = layout.find("N")
    heads = head_num if dim < 0 else query.shape[dim]
    if heads != head_num or (dim < 0 and query.shape[-1] % head_num):
        raise ValueError(f"head_num={head_num} does not match query of shape {tuple(query.shape)}")
    size = query.shape[-1] // (head_num if dim < 0 else 1)
    groups = key.shape[dim] if dim >= 0 else key.shape[-1] // max(size, 1)
    if not groups or head_num % groups:
        raise ValueError(
            f"head_num={head_num} is not a multiple of the {groups} heads of key {tuple(key.shape)}"
        )


def _check_masks(options: Options, layout: str) -> None:
    mode, mask = options.sparse_mode, options.atten_mask
    if mode not in range(9):
        raise ValueError(f"sparse_mode={mode}: use 0 to 8")
    if mode and mask is None:
        raise ValueError(f"sparse_mode={mode} needs atten_mask: without it nothing is masked")
    if mask is not None and mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"atten_mask must be bool or uint8 (1 = excluded), got {mask.dtype}")
    if mode in (5, 6) and options.prefix is None:
        raise ValueError(f"sparse_mode={mode} needs prefix, one number per sequence")
    is_packed = layout == "TND"
    if (mode in (7, 8) and not is_packed) or (mode == 5 and is_packed):
        raise ValueError(f"sparse_mode={mode} is not supported with input_layout={layout}")
    lengths = options.actual_seq_qlen, options.actual_seq_kvlen
    if is_packed and None in lengths:
        raise ValueError("input_layout=TND needs actual_seq_qlen and actual_seq_kvlen, cumulative")
