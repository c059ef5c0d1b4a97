"""Collectives that operators are fused with: groups by name, gradients, several in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

Group = ProcessGroup | str | None


def group_of(group: Group) -> ProcessGroup:
    """Return a process group for itself, for its name, or for None the one of all ranks."""
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    return dist.group.WORLD if group is None else group


def refuse_gradient(name: str, tensors: Iterable[Tensor | None]) -> None:
    """Say that an operator has no gradient before one gets lost."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(f"{name} has no gradient: call it under torch.no_grad()")


def all_reduce_each(
    makers: Iterable[Callable[[], Tensor]], group: Group, reduce_op: str = "sum"
) -> list[Tensor]:
    """Sum each tensor over the ranks while the next one is made."""
    if reduce_op != "sum":
        raise ValueError(f"reduce_op={reduce_op!r}: only 'sum' is known")
    sums, pending = [], []
    for make in makers:
        sums.append(make())
        pending.append(dist.all_reduce(sums[-1], group=group_of(group), async_op=True))
    for work in pending:
        work.wait()
    return sums


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Join the parts of all ranks along dim; the gradient is summed and cut again."""
    return _AllGather.apply(x, dim, group)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """Sum over the ranks and keep this rank's part along dim; the gradient is gathered."""
    return _ReduceScatter.apply(x, dim, group)


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Send the i-th of equal parts along dim 0 to rank i; the gradient goes the way back."""
    return _AllToAll.apply(x, group)


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _scatter(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad, ctx.dim, ctx.group), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, ctx.group), None


def _gather(x: Tensor, dim: int, group: Group) -> Tensor:
    group = group_of(group)
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty((len(front) * group.size(), *front.shape[1:]))
    dist.all_gather_into_tensor(out, front, group=group)
    return out.movedim(0, dim)


def _scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    group = group_of(group)
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty((len(front) // group.size(), *front.shape[1:]))
    dist.reduce_scatter_tensor(out, front, group=group)
    return out.movedim(0, dim)


def _exchange(x: Tensor, group: Group) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group_of(group))
    return out
