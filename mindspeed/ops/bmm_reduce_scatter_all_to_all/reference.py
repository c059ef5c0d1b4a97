"""Batched GEMM, reduce-scatter over the TP group, all-to-all over the EP group.

The transpose of `all_to_all_all_gather_bmm`, with the same symbols and shard types.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed.distributed.collectives import Group, reduce_scatter, resolve_group
from mindspeed.ops.all_to_all_all_gather_bmm.reference import check_groups, from_experts


def bmm_reduce_scatter_all_to_all(
    x: Tensor,
    weight: Tensor,
    group_ep: Group,
    ep: int,
    group_tp: Group,
    tp: int,
    *,
    bias: Tensor | None = None,
    shard_type: int = 0,
) -> Tensor:
    """Return (E, C, H / tp) for shard_type 0, (E, C / tp, H) for 1.

    Args:
        x: (E / ep, ep * C, M / tp)
        weight: (E / ep, M / tp, H)
        group_ep: the expert-parallel process group, or its name.
        ep: its size.
        group_tp: the tensor-parallel process group, or its name.
        tp: its size.
        bias: added after the sum, (E / ep, 1, H / tp) or (E / ep, 1, H).
    """
    partial = torch.bmm(x, weight).unflatten(1, (ep, -1))  # (E / ep, ep, C, H)
    total = reduce_scatter(partial, resolve_group(group_tp), 3 if shard_type == 0 else 2)
    if bias is not None:
        total = total + bias.view(len(weight), 1, 1, -1)
    return from_experts(total, group_ep)


def check(
    x: Tensor,
    weight: Tensor,
    group_ep: Group,
    ep: int,
    group_tp: Group,
    tp: int,
    **options: Any,
) -> None:
    """Raise ValueError for arguments that do not match."""
    shard_type = options.get("shard_type", 0)
    check_groups(group_ep, ep, group_tp, tp, shard_type)
    if x.ndim != 3 or weight.ndim != 3 or x.shape[::2] != weight.shape[:2] or x.shape[1] % ep:
        raise ValueError(
            "bmm_reduce_scatter_all_to_all multiplies (E, ep * C, M) by (E, M, H), got "
            f"{tuple(x.shape)} and {tuple(weight.shape)} with ep={ep}"
        )
    split = weight.shape[2] if shard_type == 0 else x.shape[1] // ep
    if split % tp:
        raise ValueError(f"{split} columns or tokens do not divide over tp={tp} ranks")
