"""Collectives with gradients that are started in one place and waited for in another.

    gathered = start_all_gather(x, group)
    index = build_index()             # while x travels
    rows = gathered.wait()[index]

In backward the order is reversed: the gradient of `wait` starts the dual collective and the
gradient of the start waits for it, so the gradient of what ran in between runs while it travels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.distributed.collectives import group_size

Sizes = list[int] | None
"""Rows for or from each rank; None where all are equal."""


class _InFlight(NamedTuple):
    result: Tensor
    work: dist.Work | None
    source: Tensor
    """Kept until the collective has read it."""

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.result


Launch = Callable[[Tensor], _InFlight]


class Started:
    """A collective under way; `wait` returns its result, once."""

    def __init__(self, x: Tensor, launch: Launch, launch_gradient: Launch) -> None:
        self._launch, self._launch_gradient = launch, launch_gradient
        self._forward: _InFlight | None = None
        self._backward: _InFlight | None = None
        # Between the two nodes of the graph goes a tensor like x: the result has another shape,
        # and autograd wants the gradient of a tensor in the shape of that tensor.
        self._between: Tensor | None = _Start.apply(x, self)

    def wait(self) -> Tensor:
        """Return the result; later calls are an error."""
        between, self._between = self._between, None
        if between is None:
            raise RuntimeError("the result of this collective was taken already")
        return _Wait.apply(between, self)


def start_all_gather(x: Tensor, group: ProcessGroup | None) -> Started:
    """Start to concatenate the equal shards of all ranks along dim 0."""
    return Started(x, lambda y: _all_gather(y, group), lambda y: _reduce_scatter(y, group))


def start_all_to_all(
    x: Tensor, send_sizes: Sizes, receive_sizes: Sizes, group: ProcessGroup | None
) -> Started:
    """Start to send send_sizes[i] rows of dim 0 to rank i and to receive receive_sizes[i]."""
    return Started(
        x,
        lambda y: _all_to_all(y, send_sizes, receive_sizes, group),
        lambda y: _all_to_all(y, receive_sizes, send_sizes, group),
    )


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, started: Started) -> Tensor:
        ctx.started = started
        started._forward = started._launch(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        in_flight, ctx.started._backward = ctx.started._backward, None
        return in_flight.wait(), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, between: Tensor, started: Started) -> Tensor:
        assert started._forward is not None
        in_flight, started._forward = started._forward, None
        ctx.started = started
        result = in_flight.wait()
        return result.view_as(result) if result is in_flight.source else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.started._backward = in_flight = ctx.started._launch_gradient(grad)
        return in_flight.result, None


def _all_gather(x: Tensor, group: ProcessGroup | None) -> _InFlight:
    size = group_size(group)
    if size == 1:
        return _InFlight(x, None, x)
    shard = x.contiguous()
    out = shard.new_empty((size * len(shard), *shard.shape[1:]))
    work = dist.all_gather_into_tensor(out, shard, group=group, async_op=True)
    return _InFlight(out, work, shard)


def _reduce_scatter(x: Tensor, group: ProcessGroup | None) -> _InFlight:
    size = group_size(group)
    if size == 1:
        return _InFlight(x, None, x)
    whole = x.contiguous()
    out = whole.new_empty((len(whole) // size, *whole.shape[1:]))
    work = dist.reduce_scatter_tensor(out, whole, group=group, async_op=True)
    return _InFlight(out, work, whole)


def _all_to_all(x: Tensor, send: Sizes, receive: Sizes, group: ProcessGroup | None) -> _InFlight:
    if group_size(group) == 1:
        return _InFlight(x, None, x)
    rows = x.contiguous()
    out = rows.new_empty((len(rows) if receive is None else sum(receive), *rows.shape[1:]))
    work = dist.all_to_all_single(out, rows, receive, send, group=group, async_op=True)
    return _InFlight(out, work, rows)
