"""Collectives with their gradients: what one does forward, its partner does backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from mindspeed.parallel.tensor.collectives import (
    all_gather,
    all_reduce,
    group_size,
    reduce_scatter,
)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


def gather_sequence(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather the sequence; the gradients of all ranks are summed and scattered back."""
    return x if group_size(group) == 1 else _Gather.apply(x, group)


def reduce_scatter_sequence(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum partial results and keep this rank's part of the sequence; gradients are gathered."""
    return x if group_size(group) == 1 else _ReduceScatter.apply(x, group)


def reduce_partial(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum partial results on every rank; the gradient, equal on all ranks, passes through."""
    return x if group_size(group) == 1 else _Reduce.apply(x, group)


def copy_to_ranks(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Hand the same tensor to every rank's shard; their gradients are summed."""
    return x if group_size(group) == 1 else _Copy.apply(x, group)
