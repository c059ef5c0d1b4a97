"""Residual sums without a compiler in between."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mindspeed import config
from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch

if TYPE_CHECKING:
    from torch import Tensor

    Pair = tuple[Tensor, Tensor | None]
    Add = Callable[[Pair, Tensor, float], Tensor]


class PlainResidual(Feature):
    """Add the residual directly where there is neither a bias nor a dropout to fuse with it."""

    name = "plain_residual"
    title = "Plain residual sum"
    group = "Fusion"
    level = Level.AFFINITY
    enabled_by = "use_plain_residual"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        use_plain_residual: bool | None = None
        """Add residuals without Megatron's compiled function where nothing is left to fuse.
        Default: on CUDA."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap what hands out the function of a layer."""
        yield Patch.wrap(
            "megatron.core.fusions.fused_bias_dropout:get_bias_dropout_add",
            wrap_get_bias_dropout_add,
            why="layers ask it for the function; a compiled one costs its guards at every call",
        )


def wrap_get_bias_dropout_add(original: Callable[..., Add]) -> Callable[..., Add]:
    """Return a sum that falls back on Megatron's function for a bias or a dropout."""

    @functools.wraps(original)
    def get_bias_dropout_add(training: bool, *args: Any, **kwargs: Any) -> Add:
        fused = original(training, *args, **kwargs)

        def add(x_with_bias: Pair, residual: Tensor, prob: float) -> Tensor:
            x, bias = x_with_bias
            is_plain = bias is None and not (training and prob) and x.requires_grad
            # Which of two types the sum has depends on the version of Megatron.
            if not is_plain or x.dtype != residual.dtype:
                return fused(x_with_bias, residual, prob)
            return residual + x

        return add

    return get_bias_dropout_add
