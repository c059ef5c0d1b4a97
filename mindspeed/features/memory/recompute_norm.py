"""Norms that are computed again in backward."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from mindspeed import config
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.features.memory.megatron import check_beside_recompute
from mindspeed.patching import Patch


class RecomputeNorm(Feature):
    """Keep the input of a layer's norms and not their output."""

    name = "recompute_norm"
    title = "Norm recompute"
    group = "Memory"
    level = Level.COMPAT
    enabled_by = "recompute_norm"

    class Options(config.Options):
        """The switch and the number of layers."""

        recompute_norm: bool = False
        """Recompute the norms before attention and MLP in backward instead of keeping their
        output."""
        recompute_norm_num_layers: Annotated[int, Field(ge=1)] | None = None
        """Layers of a pipeline stage (of a virtual stage) that do so, behind those that are
        recomputed as a whole. Default: all."""

    def check(self, options: Any, context: Context) -> None:
        """Whole layers may be recomputed before these, in blocks only."""
        check_beside_recompute(context.spelling.name_of("recompute_norm"), context)

    def patches(self, options: Any) -> Iterator[Patch]:
        """Mark the layers of a new block."""
        yield Patch.wrap(
            "megatron.core.transformer.transformer_block:TransformerBlock.__init__",
            bind(
                "mindspeed.memory.recompute_layers:wrap_init_for_norms",
                options.recompute_norm_num_layers,
            ),
            why="the block knows which of its layers are recomputed as a whole",
        )
