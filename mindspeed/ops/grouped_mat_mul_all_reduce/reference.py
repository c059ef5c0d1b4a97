"""y_i = all_reduce(x_i @ weight_i + bias_i / ranks), forward only, all-reduces overlapped.

split_item selects which side is one tensor instead of a list: 0 neither, 1 x (cut by group_list),
2 the output, 3 both.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mindspeed.distributed.collectives import Group, all_reduce_each, resolve_group
from mindspeed.ops.dispatch import refuse_gradient

_MAX_GROUPS = 64


def grouped_mat_mul_all_reduce(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    hcomm: Group,
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Sequence[int] | Tensor | None = None,
    split_item: int = 0,
    reduce_op: str = "sum",
    comm_turn: int = 0,
) -> list[Tensor]:
    """Return the sums, a list of one tensor for split_item 2 and 3.

    Args:
        x: matrices (m_i, k_i), or a list of one that `group_list` cuts for split_item 1 and 3.
        weight: matrices (k_i, n_i).
        hcomm: the ranks to sum over: a process group, or its name.
        bias: (n_i,), added once to the sum of all ranks.
        group_list: the end of each group of rows.
        comm_turn: accepted for compatibility.
    """
    parts = list(x) if group_list is None else _split(x[0], group_list)
    share = 1 / resolve_group(hcomm).size()
    makers = [
        functools.partial(_matmul, part, matrix, None if bias is None else bias[i] * share)
        for i, (part, matrix) in enumerate(zip(parts, weight, strict=True))
    ]
    sums = all_reduce_each(makers, hcomm, reduce_op)
    return [torch.cat(sums)] if split_item in (2, 3) else sums


def _split(x: Tensor, ends: Sequence[int] | Tensor) -> list[Tensor]:
    ends = ends.tolist() if isinstance(ends, Tensor) else ends
    return [x[start:end] for start, end in pairwise([0, *ends])]


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else torch.addmm(bias.to(x.dtype), x, weight)


def check(x: Sequence[Tensor], weight: Sequence[Tensor], hcomm: Group, **options: Any) -> None:
    """Raise for arguments that do not match, and for inputs that require a gradient."""
    split_item, bias = options.get("split_item", 0), options.get("bias")
    refuse_gradient("grouped_mat_mul_all_reduce", [*x, *weight, *(bias or [])])
    if split_item not in (0, 1, 2, 3):
        raise ValueError(f"split_item={split_item}: use 0, 1, 2 or 3")
    if not 1 <= len(weight) <= _MAX_GROUPS:
        raise ValueError(f"{len(weight)} groups: use 1 to {_MAX_GROUPS}")
    groups = options.get("group_list")
    if split_item in (1, 3):
        if groups is None or len(x) != 1 or len(groups) != len(weight):
            raise ValueError(
                f"split_item={split_item} cuts one x into as many parts as there are weights: "
                f"got {len(x)} tensors, {len(weight)} weights and group_list={groups}"
            )
    elif groups is not None or len(x) != len(weight):
        raise ValueError(
            f"split_item={split_item} takes one x per weight and no group_list: got {len(x)} "
            f"tensors, {len(weight)} weights and group_list={groups}"
        )
