"""Activation functions that are computed again in backward."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from mindspeed import config
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.features.memory.megatron import check_beside_recompute
from mindspeed.patching import Patch


class RecomputeActivation(Feature):
    """Keep the input of an MLP's activation function and not its output."""

    name = "recompute_activation"
    title = "Activation function recompute"
    group = "Memory"
    level = Level.COMPAT
    enabled_by = "recompute_activation_function"

    class Options(config.Options):
        """The switch and the number of layers."""

        recompute_activation_function: bool = False
        """Recompute the activation function of every MLP in backward instead of keeping its
        output."""
        recompute_activation_function_num_layers: Annotated[int, Field(ge=1)] | None = None
        """Layers of a pipeline stage (of a virtual stage) that do so, behind those that are
        recomputed as a whole. Default: all."""

    def check(self, options: Any, context: Context) -> None:
        """Whole layers may be recomputed before these, in blocks only."""
        check_beside_recompute(context.spelling.name_of("recompute_activation_function"), context)

    def patches(self, options: Any) -> Iterator[Patch]:
        """Mark the layers of a new block, and wrap the MLP."""
        package = "mindspeed.memory.recompute_layers"
        yield Patch.wrap(
            "megatron.core.transformer.transformer_block:TransformerBlock.__init__",
            bind(
                f"{package}:wrap_init_for_activations",
                options.recompute_activation_function_num_layers,
            ),
            why="the block knows which of its layers are recomputed as a whole",
        )
        yield Patch.wrap(
            "megatron.core.transformer.mlp:MLP.forward",
            f"{package}:wrap_mlp_forward",
            why="the activation function is written out between the linears, in no module",
        )
        yield Patch.wrap(
            "megatron.core.transformer.moe.experts:TEGroupedMLP.forward",
            f"{package}:wrap_grouped_mlp_forward",
            why="so it is for grouped experts",
        )
