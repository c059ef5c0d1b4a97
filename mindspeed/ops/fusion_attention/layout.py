"""Any layout as sequences of (B, N, S, D), and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mindspeed.ops.fusion_attention.contract import COPIES, Options

_ORDER = {"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}


def heads_first(x: Tensor, layout: str, head_size: int) -> Tensor:
    """View x as (B, N, S, D)."""
    if layout in ("BSH", "SBH"):
        x = x.unflatten(-1, (-1, head_size))
    return x.permute(_ORDER[layout])


def as_given(x: Tensor, layout: str) -> Tensor:
    """Turn (B, N, S, D) back."""
    order = _ORDER[layout]
    x = x.permute([order.index(dim) for dim in range(4)])
    return x.flatten(2) if layout in ("BSH", "SBH") else x


def documents(bounds: Sequence[int]) -> list[slice]:
    """Return the place of each document; zeros at the end stand for documents left out."""
    ends = [int(end) for end in bounds]
    while ends and not ends[-1]:
        ends.pop()
    return [slice(start, end) for start, end in pairwise([0, *ends])]


def copied(statistic: Tensor) -> Tensor:
    """Write a number a row eight times, as the kernels of an NPU do."""
    return statistic.to(torch.float32).unsqueeze(-1).expand(*statistic.shape, COPIES).contiguous()


def dropped_numbers(
    query: Tensor, key: Tensor, head_num: int, layout: str, options: Options
) -> int:
    """Return how many scores the dropout decides about; 0 without dropout."""
    if options.keep_prob == 1.0:
        return 0
    if layout != "TND":
        batch, length = layout.index("B"), layout.index("S")
        return query.shape[batch] * head_num * query.shape[length] * key.shape[length]
    bounds = options.actual_seq_qlen or (), options.actual_seq_kvlen or ()
    sizes = ([place.stop - place.start for place in documents(of)] for of in bounds)
    return head_num * sum(rows * columns for rows, columns in zip(*sizes))
