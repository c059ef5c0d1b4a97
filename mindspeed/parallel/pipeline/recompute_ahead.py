"""Recompute that does not wait for the gradient.

A checkpoint keeps a closure that computes its activations again. The closures of the chunk that
goes backward next run after the receive of its gradient was posted and before it is waited for;
backward finds the activations there. One that was not run ahead, because there is no message to
wait for, runs in backward as usual. Megatron's schedules stay as they are.

With `most_kept`, layers are not recomputed in general: a chunk's forward pass is checkpointed only
if so many others keep their activations already.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Checkpoint:
    """A function of tensors whose activations are computed again, ahead of backward or in it."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        from megatron.core.tensor_parallel import random

        self._function = function
        self._arguments: list[Any] | None = [
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
            for x in arguments
        ]
        self._rng_states = random._get_all_rng_states()
        self._outputs: Any = None

    def recompute(self) -> None:
        """Run the function again with the random numbers of its first run."""
        from megatron.core.tensor_parallel import random

        assert self._arguments is not None, "a checkpoint goes backward once"
        with random._fork_rng(), torch.enable_grad():
            random._set_all_rng_states(*self._rng_states)
            outputs = self._function(*self._arguments)
        self._outputs = (outputs,) if isinstance(outputs, Tensor) else outputs

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments, and let go of everything."""
        if self._outputs is None:
            self.recompute()
        pairs = [
            (output, gradient)
            for output, gradient in zip(self._outputs, gradients, strict=True)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
        arguments, self._arguments, self._outputs = self._arguments or [], None, None
        return tuple(x.grad if isinstance(x, Tensor) else None for x in arguments)


class _Checkpointed(Function):
    @staticmethod
    def forward(ctx: Any, checkpoint: Checkpoint, function: Any, *arguments: Any) -> Any:
        ctx.checkpoint = checkpoint
        with torch.no_grad():
            return function(*arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.checkpoint.backward(gradients)


class Forward:
    """A chunk's forward pass of one micro-batch, until it has gone backward."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        """Whether its activations are there."""
        self.checkpoints: list[Checkpoint] = []

    def recompute(self) -> None:
        """Compute its activations again, unless they are there."""
        if not self.keeps:
            for checkpoint in self.checkpoints:
                checkpoint.recompute()
            self.keeps = True


class Step:
    """The forward passes of a train step, and in which order they go backward.

    Args:
        order: the chunk of each backward pass.
        most_kept: forward passes that may keep their activations; None to recompute as the config
            says.
    """

    def __init__(self, order: Sequence[int], most_kept: int | None) -> None:
        self._order = order
        self._most_kept = most_kept
        self._waiting: dict[int, deque[Forward]] = {chunk: deque() for chunk in order}
        self._done = 0
        self.current: Forward | None = None

    def begin_forward(self, chunk: int) -> Forward:
        """Return another forward pass; it keeps activations if few enough others do."""
        following = self._next()
        reserved = int(following is not None and not following.keeps)
        keeps = self._most_kept is not None and self.kept() + reserved < self._most_kept
        self.current = Forward(keeps)
        self._waiting[chunk].append(self.current)
        return self.current

    def kept(self) -> int:
        """Return how many forward passes keep their activations."""
        return sum(each.keeps for waiting in self._waiting.values() for each in waiting)

    def recompute_next(self) -> None:
        """Compute the activations that the next backward pass needs."""
        following = self._next()
        if following is not None:
            following.recompute()

    def end_backward(self) -> None:
        """Forget the forward pass that has gone backward."""
        self._waiting[self._order[self._done]].popleft()
        self._done += 1

    def _next(self) -> Forward | None:
        if self._done == len(self._order):
            return None
        waiting = self._waiting[self._order[self._done]]
        return waiting[0] if waiting else None


# The train step that runs; None outside of one.
_step: ContextVar[Step | None] = ContextVar("recompute_ahead_step", default=None)


def wrap_get_forward_backward_func(
    original: Callable[..., Any], only_excess: bool
) -> Callable[..., Any]:
    """Follow the forward and backward passes of a schedule.

    Args:
        original: Megatron's.
        only_excess: recompute only what is more than a pipeline needs to be full.
    """

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = original(*args, **kwargs)

        @functools.wraps(schedule)
        def forward_backward(
            *, forward_step_func: Any, model: Any, forward_only: bool = False, **options: Any
        ) -> Any:
            chunks = model if isinstance(model, list) else [model]
            options |= {"model": model, "forward_only": forward_only}
            if forward_only:
                return schedule(forward_step_func=forward_step_func, **options)
            step = _new_step(chunks, options["num_microbatches"], only_excess)
            token = _step.set(step)
            try:
                return schedule(
                    forward_step_func=_followed(forward_step_func, step, chunks), **options
                )
            finally:
                _step.reset(token)

        return forward_backward

    return get_forward_backward_func


def _new_step(chunks: Sequence[Any], num_microbatches: int, only_excess: bool) -> Step:
    from megatron.core.pipeline_parallel.schedules import get_schedule_table
    from megatron.core.utils import get_model_config

    config = get_model_config(chunks[0])
    stages, last = config.pipeline_model_parallel_size, len(chunks) - 1
    group_size = config.microbatch_group_size_per_vp_stage or stages
    table = get_schedule_table(num_microbatches, len(chunks), group_size)
    order = [last - chunk for _, chunk in table]
    return Step(order, stages * len(chunks) if only_excess else None)


def _followed(forward_step_func: Any, step: Step, chunks: Sequence[Any]) -> Callable[..., Any]:
    from megatron.core.utils import get_model_config

    config = get_model_config(chunks[0])

    @functools.wraps(forward_step_func)
    def forward_step(data_iterator: Any, model: Any, *others: Any) -> Any:
        forward = step.begin_forward(next(i for i, each in enumerate(chunks) if each is model))
        try:
            with _recomputing(config, not forward.keeps):
                return forward_step_func(data_iterator, model, *others)
        finally:
            step.current = None

    return forward_step


@contextmanager
def _recomputing(config: Any, wanted: bool) -> Iterator[None]:
    """Recompute all layers of the chunks that run inside, unless the config says how."""
    if not wanted or config.recompute_granularity is not None:
        yield
        return
    config.recompute_granularity, config.recompute_method = "full", "block"
    config.recompute_num_layers = config.num_layers
    try:
        yield
    finally:
        config.recompute_granularity = config.recompute_method = None
        config.recompute_num_layers = None


def wrap_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the closures of checkpoints in a forward pass that a step follows."""

    @functools.wraps(original)
    def checkpoint(function: Any, distribute_saved_activations: bool, *args: Any) -> Any:
        step = _step.get()
        forward = None if step is None else step.current
        # Without gradients it is part of a layer that is checkpointed itself.
        is_nested = not torch.is_grad_enabled()
        if forward is None or is_nested or distribute_saved_activations:
            return original(function, distribute_saved_activations, *args)
        kept = Checkpoint(function, args)
        forward.checkpoints.append(kept)
        return _Checkpointed.apply(kept, function, *args)

    return checkpoint


def wrap_backward_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Count backward passes."""

    @functools.wraps(original)
    def backward_step(*args: Any, **kwargs: Any) -> Any:
        gradients = original(*args, **kwargs)
        step = _step.get()
        if step is not None:
            step.end_backward()
        return gradients

    return backward_step


class _RecomputeThenWait:
    """A gradient that comes: there is time to recompute before it is waited for."""

    def __init__(self, handle: Any, step: Step) -> None:
        self._handle = handle
        self._step = step

    def wait(self) -> None:
        self._step.recompute_next()
        self._handle.wait()


def wrap_p2p_ops(original: Callable[..., Any]) -> Callable[..., Any]:
    """Recompute before a gradient is waited for. It starts messages and returns their handles."""

    @functools.wraps(original)
    def p2p_ops(*args: Any, **kwargs: Any) -> Any:
        handles = original(*args, **kwargs)
        step = _step.get()
        if step is None or kwargs["tensor_recv_next"] is None:
            return handles
        if isinstance(handles, dict):
            handles["recv_next"] = _RecomputeThenWait(handles["recv_next"], step)
        else:  # batched: all are waited for in a row
            handles[0] = _RecomputeThenWait(handles[0], step)
        return handles

    return p2p_ops
