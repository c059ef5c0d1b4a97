"""All-to-all over the EP group, all-gather over the TP group, batched GEMM, activation.

E experts of which E / ep are local, capacity C per expert and rank, H and M columns. The TP group
splits the columns of x (E, C, H / tp) with shard_type 0, its capacity (E, C / tp, H) with 1.
The result has the tokens of all ranks, those of an EP rank side by side: (E / ep, ep * C, M / tp).
The gradient of the whole is `bmm_reduce_scatter_all_to_all` and one GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.distributed.collectives import Group, all_gather, all_to_all, resolve_group


def _fast_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "None": lambda x: x,
    "GELU": F.gelu,
    "Silu": F.silu,
    "FastGELU": _fast_gelu,
    "Relu": F.relu,
}


def all_to_all_all_gather_bmm(
    x: Tensor,
    weight: Tensor,
    group_ep: Group,
    ep: int,
    group_tp: Group,
    tp: int,
    *,
    bias: Tensor | None = None,
    shard_type: int = 0,
    act_type: str = "None",
    need_allgather_out: bool = False,
    need_activation_feature: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the activation, and on request the gathered x and the input of the activation.

    Args:
        x: (E, C, H / tp) or (E, C / tp, H)
        weight: (E / ep, H, M / tp)
        group_ep: the expert-parallel process group, or its name.
        ep: its size.
        group_tp: the tensor-parallel process group, or its name.
        tp: its size.
        bias: (E / ep, 1, M / tp) or (E / ep, M / tp)
        act_type: None, GELU, Silu, FastGELU or Relu.
    """
    received = to_experts(x, group_ep, ep)  # (E / ep, ep, C, H / tp) or (E / ep, ep, C / tp, H)
    dim = 3 if shard_type == 0 else 2
    gathered = all_gather(received, resolve_group(group_tp), dim).flatten(1, 2)
    hidden = torch.bmm(gathered, weight)
    if bias is not None:
        hidden = hidden + bias.view(len(weight), 1, -1)
    return (
        ACTIVATIONS[act_type](hidden),
        gathered if need_allgather_out else None,
        hidden if need_activation_feature else None,
    )


def to_experts(x: Tensor, group: Group, ep: int) -> Tensor:
    """Send each expert's tokens to its rank: (E, C, H) -> (E / ep, ep, C, H)."""
    parts = all_to_all(x, resolve_group(group)).view(ep, len(x) // ep, *x.shape[1:])
    return parts.transpose(0, 1)


def from_experts(x: Tensor, group: Group) -> Tensor:
    """Send the tokens back to their ranks: (E / ep, ep, C, H) -> (E, C, H)."""
    return all_to_all(x.transpose(0, 1).flatten(0, 1), resolve_group(group))


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
    check_groups(group_ep, ep, group_tp, tp, options.get("shard_type", 0))
    act_type = options.get("act_type", "None")
    if act_type not in ACTIVATIONS:
        raise ValueError(f"act_type={act_type!r}: use {', '.join(ACTIVATIONS)}")
    columns = x.shape[-1] * (tp if options.get("shard_type", 0) == 0 else 1)
    if x.ndim != 3 or weight.ndim != 3 or len(x) != ep * len(weight) or columns != weight.shape[1]:
        raise ValueError(
            "all_to_all_all_gather_bmm multiplies x of ep * E experts by weight (E, H, M), got "
            f"{tuple(x.shape)} and {tuple(weight.shape)} with ep={ep}, tp={tp}"
        )


def check_groups(group_ep: Group, ep: int, group_tp: Group, tp: int, shard_type: int) -> None:
    """Raise ValueError if ep and tp are not the sizes of the groups."""
    sizes = resolve_group(group_ep).size(), resolve_group(group_tp).size()
    if (ep, tp) != sizes:
        raise ValueError(
            f"ep={ep} and tp={tp}, but the groups have {sizes[0]} and {sizes[1]} ranks"
        )
    if shard_type not in (0, 1):
        raise ValueError(f"shard_type={shard_type}: use 0 (columns) or 1 (capacity)")
