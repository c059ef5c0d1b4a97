"""Residual sums without a compiler in between."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


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
            "mindspeed.compat.residual:wrap_get_bias_dropout_add",
            why="layers ask it for the function; a compiled one costs its guards at every call",
        )
