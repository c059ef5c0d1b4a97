"""Collectives with gradients: what one does in forward, its dual does in backward.

    collective           gradient
    all_gather           reduce_scatter
    reduce_scatter       all_gather
    all_reduce           identity (the gradient is the same on every rank)
    copy_to_group        all_reduce
    all_to_all           all_to_all with the two dimensions swapped

Without a group, or in a group of one rank, they return their input. Without gradients (inside an
autograd.Function, under no_grad) they leave nothing in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

Group = ProcessGroup | str | None
"""A process group, the name of one, or None for that of all ranks."""


def resolve_group(group: Group) -> ProcessGroup:
    """Return a process group for itself, for its name, or for None the one of all ranks."""
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    if group is not None:
        return group
    world: ProcessGroup | None = dist.group.WORLD
    if world is None:
        raise RuntimeError("no process group is initialized: call init_distributed first")
    return world


def group_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks of a group; no group is a group of one."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """Return the rank of this process in a group; no group is a group of one."""
    return 0 if group is None else group.rank()


def all_gather(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """Concatenate the equal shards of all ranks along dim."""
    if group is None or group.size() == 1:
        return x
    return _AllGather.apply(x, group, dim) if _needs_graph(x) else _all_gather(x, group, dim)


def reduce_scatter(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """Sum over the ranks and return this rank's shard along dim."""
    if group is None or (size := group.size()) == 1:
        return x
    if x.shape[dim] % size:
        raise ValueError(
            f"dim {dim} of length {x.shape[dim]} does not split over {size} ranks: pad it to a "
            f"multiple of {size}, or turn sequence_parallel off if it is the sequence"
        )
    if _needs_graph(x):
        return _ReduceScatter.apply(x, group, dim)
    return _reduce_scatter(x, group, dim)


def all_reduce(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the ranks into a new tensor."""
    if group is None or group.size() == 1:
        return x
    return _AllReduce.apply(x, group) if _needs_graph(x) else _all_reduce(x, group)


def copy_to_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return x, the same on every rank of the group; the gradients of the ranks are summed."""
    return x if group_size(group) == 1 else _CopyToGroup.apply(x, group)


def all_to_all(
    x: Tensor, group: ProcessGroup | None, scatter_dim: int = 0, gather_dim: int = 0
) -> Tensor:
    """Send the i-th part along scatter_dim to rank i; concatenate what arrives along gather_dim."""
    if group is None or (size := group.size()) == 1:
        return x
    parts = x.unflatten(scatter_dim, (size, -1)).movedim(scatter_dim, 0)
    received = _AllToAll.apply(parts, group) if _needs_graph(x) else _all_to_all(parts, group)
    return received.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


def all_reduce_each(
    makers: Iterable[Callable[[], Tensor]], group: Group, reduce_op: str = "sum"
) -> list[Tensor]:
    """Sum each tensor over the ranks while the next one is computed; without gradients."""
    if reduce_op != "sum":
        raise ValueError(f"reduce_op={reduce_op!r}: only 'sum' is supported")
    sums, pending = [], []
    for make in makers:
        sums.append(make())
        pending.append(dist.all_reduce(sums[-1], group=resolve_group(group), async_op=True))
    for work in pending:
        work.wait()
    return sums


def exchange(
    sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]], group: ProcessGroup
) -> Pending:
    """Start to send tensors to ranks of the group and to receive from others, without waiting.

    Empty tensors do not travel. Ranks must start the messages of a pair in the same order.
    """
    messages: list[tuple[Any, Tensor, int]] = [(dist.isend, *message) for message in sends]
    messages += [(dist.irecv, *message) for message in receives]
    operations = [
        dist.P2POp(start, tensor, group=group, group_peer=peer)
        for start, tensor, peer in messages
        if tensor.numel()
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return Pending(works, [tensor for _, tensor, _ in messages])


class Pending:
    """Messages under way; their tensors are kept until they have arrived."""

    def __init__(self, works: list[dist.Work], tensors: list[Tensor]) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        """Wait for all messages; a second call returns at once."""
        for work in self._works:
            work.wait()
        self._works, self._tensors = [], []


def all_to_all_uneven(
    x: Tensor, send_sizes: list[int], receive_sizes: list[int], group: ProcessGroup
) -> Tensor:
    """Send the first send_sizes[0] elements of a flat tensor to rank 0 and so on; no gradient."""
    received = x.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, x.contiguous(), receive_sizes, send_sizes, group=group)
    return received


def all_gather_uneven(x: Tensor, sizes: list[int], group: ProcessGroup) -> list[Tensor]:
    """Return the flat tensors of all ranks, of the given sizes; no gradient."""
    gathered = _all_gather(_padded(x, max(sizes)), group, 0).view(len(sizes), -1)
    return [row[:size] for row, size in zip(gathered, sizes)]


def reduce_scatter_uneven(parts: list[Tensor], group: ProcessGroup) -> Tensor:
    """Sum flat tensors over the ranks, and return the one at this rank's number; no gradient."""
    longest = max(len(part) for part in parts)
    whole = torch.cat([_padded(part, longest) for part in parts])
    return _reduce_scatter(whole, group, 0)[: len(parts[group.rank()])]


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.group, ctx.dim), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.group, ctx.dim), None, None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _CopyToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grad, ctx.group), None


def _needs_graph(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _padded(x: Tensor, size: int) -> Tensor:
    return x if len(x) == size else torch.nn.functional.pad(x, (0, size - len(x)))


def _all_gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    shard = _to_front(x, dim)
    out = shard.new_empty((shard.shape[0] * group.size(), *shard.shape[1:]))
    dist.all_gather_into_tensor(out, shard, group=group)
    return out.movedim(0, dim) if dim else out


def _reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    whole = _to_front(x, dim)
    out = whole.new_empty((whole.shape[0] // group.size(), *whole.shape[1:]))
    dist.reduce_scatter_tensor(out, whole, group=group)
    return out.movedim(0, dim) if dim else out


def _to_front(x: Tensor, dim: int) -> Tensor:
    """Return a contiguous tensor whose dim 0 is dim of x, as the collectives need it."""
    return (x.movedim(dim, 0) if dim else x).contiguous()


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_to_all(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange parts along dim 0, of which each rank gets an equal number; its own inverse."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received
