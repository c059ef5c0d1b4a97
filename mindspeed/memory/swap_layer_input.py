"""Inputs of layers that are recomputed as a whole, kept on the host until backward.

A recomputed layer keeps its input and nothing else. Megatron calls `checkpoint` for every such
layer (or chunk of layers) of a block; each call is a region of the block's swapper, which takes the
hidden states. What else a call saves, rotary tables and masks, belongs to all layers and stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from mindspeed import device
from mindspeed.memory.swap import Region, Swapper


class SwappedInputs:
    """The recomputed layers of one block, in the order of its forward passes."""

    def __init__(self, swapper: Swapper) -> None:
        self._swapper = swapper
        self._last: Region | None = None

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Make what is checkpointed inside regions of one forward pass."""
        self._last = None
        token = _forward_pass.set(self)
        try:
            yield
        finally:
            _forward_pass.reset(token)
            self._last = None

    def region(self, hidden_states: Tensor) -> Region:
        """Return the context of the next checkpointed layer."""
        self._last = Region(self._swapper, self._last, only=hidden_states)
        return self._last


_forward_pass: ContextVar[SwappedInputs | None] = ContextVar("forward_pass", default=None)
"""The block whose layers run now: `checkpoint` is a function and does not know it."""


def wrap_transformer_block_init(original: Callable[..., None]) -> Callable[..., None]:
    """Let a new block keep the inputs of recomputed layers on the host, where that is elsewhere."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if device.current().name != "cpu":
            self.swapped_inputs = SwappedInputs(Swapper())

    return init


def wrap_checkpointed_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Run the layers of a block that is marked so as one forward pass."""

    @functools.wraps(original)
    def checkpointed_forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        swapped: SwappedInputs | None = getattr(self, "swapped_inputs", None)
        if swapped is None or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        with swapped.forward_pass():
            return original(self, *args, **kwargs)

    return checkpointed_forward


def wrap_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpoint a layer inside a region, if its block has them."""

    @functools.wraps(original)
    def checkpoint(function: Any, distribute_saved_activations: bool, *args: Any) -> Any:
        swapped = _forward_pass.get()
        # Without gradients it is part of a layer that is checkpointed itself.
        if swapped is None or not torch.is_grad_enabled():
            return original(function, distribute_saved_activations, *args)
        with swapped.region(args[0]):
            return original(function, distribute_saved_activations, *args)

    return checkpoint
