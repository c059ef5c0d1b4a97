"""Residual sums that come with the norm behind them."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class FusedResidualNorm(Feature):
    """Add the residual and normalise the sum in one kernel, forward and backward."""

    name = "fused_residual_norm"
    title = "Fused residual sum and norm"
    group = "Fusion"
    level = Level.AFFINITY
    enabled_by = "use_fused_residual_norm"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        use_fused_residual_norm: bool | None = None
        """Add residuals in the kernel of the RMSNorm that reads the sum. Default: on CUDA."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Connect sums and norms once a block has all its layers."""
        yield Patch.wrap(
            "megatron.core.transformer.transformer_block:TransformerBlock.__init__",
            "mindspeed.te.fused_residual_norm:wrap_transformer_block_init",
            why="a sum and the norm that reads it may belong to two layers: the block has both",
        )
        yield Patch.wrap(
            "megatron.core.transformer.transformer_block:TransformerBlock.forward",
            "mindspeed.te.fused_residual_norm:wrap_transformer_block_forward",
            why="only in the block's own loop is each norm certain to read the sum before it",
        )
