"""Multiply, sum and cut over the tensor ranks, exchange over the expert ranks.

The transpose of `all_to_all_all_gather_bmm`, whose letters and shard types are meant here too.
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
        group_ep: the ranks that share the experts: a process group, or its name.
        ep: their number.
        group_tp: the ranks that share each expert.
        tp: their number.
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
    """Refuse what does not fit together."""
    shard_type = options.get("shard_type", 0)
    check_groups(group_ep, ep, group_tp, tp, shard_type)
    if x.ndim != 3 or weight.ndim != 3 or x.shape[::2] != weight.shape[:2] or x.shape[1] % ep:
        raise ValueError(
            "bmm_reduce_scatter_all_to_all multiplies (E, ep * C, M) by (E, M, H), got "
            f"{tuple(x.shape)} and {tuple(weight.shape)} with ep={ep}"
        )
    cut = weight.shape[2] if shard_type == 0 else x.shape[1] // ep
    if cut % tp:
        raise ValueError(f"{cut} columns or places do not split over tp={tp} ranks")
