"""Activation recompute, and the random states under the names Megatron imports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from mindspeed import device
from mindspeed.distributed.collectives import all_gather, group_rank, group_size
from mindspeed.te.pytorch.random import CudaRNGStatesTracker, RandomStates, get_all_rng_states

__all__ = [
    "CudaRNGStatesTracker",
    "activation_recompute_forward",
    "checkpoint",
    "get_all_rng_states",
]


def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> AbstractContextManager[None]:
    """Mark a recomputed forward for FP8 scaling; without FP8 there is nothing to mark."""
    return nullcontext()


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function without keeping its activations; backward computes them again.

    Args:
        function: called as function(*args, **kwargs), twice, with the same random states.
        distribute_saved_activations: keep only this rank's piece of the first argument.
        get_rng_state_tracker: returns the tracker whose states are repeated too.
        tp_group: ranks that hold the same first argument.
        kwargs: passed through; gradients flow to positional tensors only.
    """
    tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
    group = tp_group if distribute_saved_activations else None
    first = args[0] if args else None
    if group_size(group) > 1 and (
        not isinstance(first, Tensor) or first.numel() % group_size(group)
    ):
        raise ValueError(
            "distribute_saved_activations needs a first tensor argument whose size splits over "
            f"the {group_size(group)} tensor-parallel ranks: turn it off"
        )
    return _Checkpoint.apply(_Call(function, kwargs, group, RandomStates(tracker)), *args)


@dataclass(frozen=True)
class _Call:
    """A function call that can be repeated exactly."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    group: ProcessGroup | None
    states: RandomStates

    def keep(self, index: int, x: Tensor) -> Tensor:
        """Return what is saved of an argument: of the first one, this rank's piece."""
        if index or group_size(self.group) == 1:
            return x
        return x.detach().flatten().chunk(group_size(self.group))[group_rank(self.group)].clone()

    def give_back(self, index: int, kept: Tensor, shape: torch.Size) -> Tensor:
        """Undo keep()."""
        if index or group_size(self.group) == 1:
            return kept
        return all_gather(kept, self.group).view(shape)


class _Checkpoint(Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *args: Any) -> Any:
        ctx.call = call
        ctx.autocast = _autocast_now()
        is_tensor = [isinstance(arg, Tensor) for arg in args]
        ctx.shapes = [arg.shape if yes else None for arg, yes in zip(args, is_tensor)]
        ctx.others = [None if yes else arg for arg, yes in zip(args, is_tensor)]
        tensors = [call.keep(i, arg) for i, arg in enumerate(args) if is_tensor[i]]
        ctx.save_for_backward(*tensors)
        with torch.no_grad():
            return call.function(*args, **call.kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("a checkpointed function works with backward(), not with grad()")
        args = _Checkpoint._arguments(ctx)
        with ctx.call.states.replayed(), torch.enable_grad(), ctx.autocast:
            outputs = ctx.call.function(*args, **ctx.call.kwargs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        wanted = [
            (out, grad)
            for out, grad in zip(outputs, grads)
            if isinstance(out, Tensor) and out.requires_grad
        ]
        torch.autograd.backward([out for out, _ in wanted], [grad for _, grad in wanted])
        return None, *(arg.grad if isinstance(arg, Tensor) else None for arg in args)

    @staticmethod
    def _arguments(ctx: Any) -> list[Any]:
        """Return the arguments of the first call, cut off from the graph before it."""
        saved = iter(ctx.saved_tensors)
        args: list[Any] = []
        for index, (shape, other) in enumerate(zip(ctx.shapes, ctx.others)):
            if shape is None:
                args.append(other)
                continue
            tensor = ctx.call.give_back(index, next(saved), shape).detach()
            args.append(tensor.requires_grad_(ctx.needs_input_grad[index + 1]))
        return args


def _autocast_now() -> AbstractContextManager[Any]:
    """Return a context that brings the present autocast setting back."""
    kind = device.current().name
    return torch.autocast(
        kind,
        enabled=torch.is_autocast_enabled(kind),
        dtype=torch.get_autocast_dtype(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
