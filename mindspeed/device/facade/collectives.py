"""Scaled sums, which NCCL has and gloo has not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu


@dataclass(frozen=True)
class ScaledSum:
    """What NCCL calls premul_sum: multiply by the factor, then add."""

    factor: float | Tensor


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield (owner, attribute, stand-in) for the collectives and for the maker of scaled sums."""
    if not dist.is_available():
        return
    table = {
        "_make_nccl_premul_sum": ScaledSum,
        "all_reduce": _scale_in_place(dist.all_reduce),
        "reduce_scatter_tensor": _scale_copy(dist.reduce_scatter_tensor),
    }
    table["_reduce_scatter_base"] = table["reduce_scatter_tensor"]
    for name, stand_in in table.items():
        yield dist, name, stand_in
        yield distributed_c10d, name, stand_in


def _scale_in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        if isinstance(op, ScaledSum):
            with torch.no_grad():
                tensor.mul_(op.factor)
            op = dist.ReduceOp.SUM
        return original(tensor, op, *args, **kwargs)

    return all_reduce


def _scale_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_scatter_tensor(
        output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(op, ScaledSum):
            input = input.detach() * op.factor
            op = dist.ReduceOp.SUM
        return original(output, input, op, *args, **kwargs)

    return reduce_scatter_tensor
