"""Which modules of a block of Megatron's keep their saved tensors on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from mindspeed import device
from mindspeed.memory.recompute_layers import chosen_layers
from mindspeed.memory.swap import Region, Swapper

MODULES = {
    "input_norm": "input_layernorm",
    "self_attention": "self_attention",
    "post_attention_norm": "pre_mlp_layernorm",
}
"""The names of the flag, and the attributes of a layer."""


class SwappedModule:
    """One module's calls as regions, each of which knows the one before in its forward pass."""

    def __init__(self, swapper: Swapper, previous: SwappedModule | None) -> None:
        self._swapper = swapper
        self._previous = previous
        self._last: Region | None = None
        self._stack = ExitStack()

    def region(self) -> AbstractContextManager[Any]:
        """Return the context of one call."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return nullcontext()
        previous = None if self._previous is None else self._previous._take()
        self._last = Region(self._swapper, previous)
        return self._last

    def watch(self, module: nn.Module) -> None:
        """Make every call of a module a region."""
        module.register_forward_pre_hook(lambda *_: self._enter())
        module.register_forward_hook(lambda *_: self._stack.close(), always_call=True)

    def _enter(self) -> None:
        self._stack.enter_context(self.region())

    def _take(self) -> Region | None:
        last, self._last = self._last, None
        return last


def wrap_transformer_block_init(
    original: Callable[..., None], names: Sequence[str]
) -> Callable[..., None]:
    """Let modules of a new block keep their saved tensors on the host, where that is elsewhere."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if device.current().name != "cpu":
            swap_block(self, names, Swapper())

    return init


def swap_block(block: Any, names: Sequence[str], swapper: Swapper) -> None:
    """Let modules of a block's layers, but those recomputed as a whole, swap."""
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.identity_op import IdentityOp

    previous = None
    for layer in chosen_layers(block, None):
        for module in (getattr(layer, MODULES[name]) for name in MODULES if name in names):
            if isinstance(module, IdentityOp):
                continue
            previous = SwappedModule(swapper, previous)
            if isinstance(module, Attention):
                module.swapped = previous
            else:
                previous.watch(module)


def wrap_attention_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run an attention that is marked so in a region.

    Not by hooks of the module: residual sums compute the norm of a module only if it has none.
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        swapped: SwappedModule | None = getattr(self, "swapped", None)
        with nullcontext() if swapped is None else swapped.region():
            return original(self, *args, **kwargs)

    return forward
