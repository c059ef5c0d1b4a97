"""Exchange over the expert ranks, gather over the tensor ranks, multiply, activate.

E experts of which E / ep are here, C places an expert and rank, H and M columns. With shard_type 0
the tensor ranks share the columns of x (E, C, H / tp), with 1 its places (E, C / tp, H). The
product has the places of all ranks, an expert rank's side by side: (E / ep, ep * C, M / tp).
Each step has its gradient: that of the whole is `bmm_reduce_scatter_all_to_all` and one product.
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
    """Return the activated product, and where asked for the gathered x and the plain product.

    Args:
        x: (E, C, H / tp) or (E, C / tp, H)
        weight: (E / ep, H, M / tp)
        group_ep: the ranks that share the experts: a process group, or its name.
        ep: their number.
        group_tp: the ranks that share each expert.
        tp: their number.
        bias: (E / ep, 1, M / tp) or (E / ep, M / tp)
        act_type: None, GELU, Silu, FastGELU or Relu.
    """
    received = to_experts(x, group_ep, ep)  # (E / ep, ep, C, H / tp) or (E / ep, ep, C / tp, H)
    dim = 3 if shard_type == 0 else 2
    gathered = all_gather(received, resolve_group(group_tp), dim).flatten(1, 2)
    product = torch.bmm(gathered, weight)
    if bias is not None:
        product = product + bias.view(len(weight), 1, -1)
    return (
        ACTIVATIONS[act_type](product),
        gathered if need_allgather_out else None,
        product if need_activation_feature else None,
    )


def to_experts(x: Tensor, group: Group, ep: int) -> Tensor:
    """Send each expert's places to its rank: (E, C, H) -> (E / ep, ep, C, H)."""
    parts = all_to_all(x, resolve_group(group)).view(ep, len(x) // ep, *x.shape[1:])
    return parts.transpose(0, 1)


def from_experts(x: Tensor, group: Group) -> Tensor:
    """Send the places back to where they came from: (E / ep, ep, C, H) -> (E, C, H)."""
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
    """Refuse what does not fit together."""
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
    """Refuse numbers that are not those of the groups."""
    sizes = resolve_group(group_ep).size(), resolve_group(group_tp).size()
    if (ep, tp) != sizes:
        raise ValueError(
            f"ep={ep} and tp={tp}, but the groups have {sizes[0]} and {sizes[1]} ranks"
        )
    if shard_type not in (0, 1):
        raise ValueError(f"shard_type={shard_type}: use 0 (columns) or 1 (places)")
