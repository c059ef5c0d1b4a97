"""What NCCL does and gloo does not: scaled sums, pieces of any shape, safe sends.

NCCL gathers and scatters elements; gloo wants every piece in the shape of a slice of the whole.
"""

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
        "isend": _keep_memory(dist.isend),
        "all_reduce": _scale_in_place(dist.all_reduce),
        "reduce_scatter_tensor": _scale_copy(dist.reduce_scatter_tensor),
        "all_gather_into_tensor": _of_any_shape(dist.all_gather_into_tensor),
    }
    table["_reduce_scatter_base"] = table["reduce_scatter_tensor"]
    table["_all_gather_base"] = table["all_gather_into_tensor"]
    for name, stand_in in table.items():
        yield dist, name, stand_in
        yield distributed_c10d, name, stand_in


def _keep_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        # A pipeline stage takes the memory out of a tensor as soon as it is on its way
        # (`tensor.data = ...`). The work then holds an empty tensor, and gloo would send what else
        # is put into that memory; a second tensor holds it until the work is done.
        return original(tensor.detach(), *args, **kwargs)

    return isend


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
        return original(*_elements(output, input), op, *args, **kwargs)

    return reduce_scatter_tensor


def _of_any_shape(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather_into_tensor(
        output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        return original(*_elements(output_tensor, input_tensor), *args, **kwargs)

    return all_gather_into_tensor


def _elements(output: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as plain rows of elements where one is no slice of the other."""
    if output.shape[1:] == input.shape[1:] or not output.is_contiguous():
        return output, input
    return output.view(-1), input.reshape(-1)
