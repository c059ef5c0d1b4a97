"""Parts of layers that are computed again in backward: activation functions and norms."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.features.memory.megatron import check_beside_recompute
from mindspeed.patching import Patch

_LAYERS = "mindspeed.memory.recompute_layers"
NumLayers = Annotated[int, Field(ge=1)] | None


class RecomputePart(Feature):
    """A part of every layer behind those that are recomputed as a whole."""

    group = "Memory"
    level = Level.COMPAT
    marks: ClassVar[str]
    """The function that lets the layers of a new block recompute it."""

    def check(self, options: Any, context: Context) -> None:
        """Whole layers may be recomputed before these, in blocks only; there are enough layers."""
        assert self.enabled_by is not None
        check_beside_recompute(context.spelling.name_of(self.enabled_by), context)
        field = f"{self.enabled_by}_num_layers"
        given, layers = getattr(options, field), context.argument("num_layers")
        if given is not None and layers is not None and given > layers:
            raise ConfigError(
                f"{context.spelling.with_value(field, given)}: the model has {layers} layers: use "
                "at most so many, or drop it for all"
            )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Mark the layers of a new block."""
        yield Patch.wrap(
            "megatron.core.transformer.transformer_block:TransformerBlock.__init__",
            bind(f"{_LAYERS}:{self.marks}", getattr(options, f"{self.enabled_by}_num_layers")),
            why="the block knows which of its layers are recomputed as a whole",
        )


class RecomputeActivation(RecomputePart):
    """Keep the input of an MLP's activation function and not its output."""

    name = "recompute_activation"
    title = "Activation function recompute"
    enabled_by = "recompute_activation_function"
    marks = "wrap_init_for_activations"

    class Options(config.Options):
        """The switch and the number of layers."""

        recompute_activation_function: bool = False
        """Recompute the activation function of every MLP in backward instead of keeping its
        output."""
        recompute_activation_function_num_layers: NumLayers = None
        """Layers of a pipeline stage (of a virtual stage) that do so, behind those that are
        recomputed as a whole. Default: all."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Mark the layers of a new block, and wrap the MLPs."""
        yield from super().patches(options)
        yield Patch.wrap(
            "megatron.core.transformer.mlp:MLP.forward",
            f"{_LAYERS}:wrap_mlp_forward",
            why="the activation function is written out between the linears, in no module",
        )
        yield Patch.wrap(
            "megatron.core.transformer.moe.experts:TEGroupedMLP.forward",
            f"{_LAYERS}:wrap_grouped_mlp_forward",
            why="so it is for grouped experts",
        )


class RecomputeNorm(RecomputePart):
    """Keep the input of a layer's norms and not their output."""

    name = "recompute_norm"
    title = "Norm recompute"
    enabled_by = "recompute_norm"
    marks = "wrap_init_for_norms"

    class Options(config.Options):
        """The switch and the number of layers."""

        recompute_norm: bool = False
        """Recompute the norms before attention and MLP in backward instead of keeping their
        output."""
        recompute_norm_num_layers: NumLayers = None
        """Layers of a pipeline stage (of a virtual stage) that do so, behind those that are
        recomputed as a whole. Default: all."""
