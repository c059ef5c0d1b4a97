"""Layers that do nothing, to balance pipeline stages that also hold the embedding or the loss."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import field_validator

from mindspeed import config
from mindspeed.compat import megatron
from mindspeed.config import CommaSeparated, ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.patching import Patch

PACKAGE = "mindspeed.parallel.pipeline.noop_layer"
# Megatron arguments that place layers themselves, so that a layer number no longer says where.
PLACEMENTS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)


class NoopLayers(Feature):
    """Turn the named layers into the identity; `--num-layers` counts them."""

    name = "noop_layers"
    title = "Custom no-op layers"
    group = "Parallel"
    level = Level.ALGORITHM
    enabled_by = "noop_layers"

    class Options(config.Options):
        """Which layers do nothing."""

        noop_layers: Annotated[tuple[int, ...], CommaSeparated] = ()
        """Layers that do nothing, by their number from 0 on, as in "0,5"; --num-layers counts
        them."""

        @field_validator("noop_layers")
        @classmethod
        def _are_layers(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
            if any(layer < 0 for layer in layers):
                raise ValueError("layers are numbered from 0 on")
            if len(set(layers)) < len(layers):
                raise ValueError("name each layer once")
            return tuple(sorted(layers))

    def check(self, options: Any, context: Context) -> None:
        """Every named layer exists, one layer is left, and nothing else places the layers."""
        total = context.argument("num_layers")
        if total is None:
            return
        given = context.spelling.with_value("noop_layers", ",".join(map(str, options.noop_layers)))
        if options.noop_layers[-1] >= total:
            raise ConfigError(
                f"{given} names a layer that does not exist: --num-layers {total} allows "
                f"0 to {total - 1}"
            )
        if len(options.noop_layers) == total:
            raise ConfigError(f"{given} leaves no layer of --num-layers {total}: name fewer")
        for placement in PLACEMENTS:
            if context.argument(placement) is not None:
                flag = config.flag_name(placement)
                raise ConfigError(
                    f"{given} and {flag} cannot be used together: both move layers between "
                    "pipeline stages; drop one"
                )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Change the layer list before Megatron builds it, and what depends on its length."""
        layers = options.noop_layers
        yield Patch.wrap(
            "megatron.core.transformer.transformer_block:_get_block_submodules",
            bind(f"{PACKAGE}:wrap_get_block_submodules", layers),
            why="the only place that sees the specs of a stage, whichever spec the script gave",
        )
        yield Patch.wrap(
            "megatron.core.transformer.transformer_block:TransformerBlock.sharded_state_dict",
            f"{PACKAGE}:wrap_sharded_state_dict",
            why="layers without weights leave holes in tensors that are stacked over layers",
        )
        # Only Megatron-LM's own training package counts operations.
        if megatron.has_training():
            yield Patch.wrap(
                "megatron.training.training:num_floating_point_operations",
                bind(f"{PACKAGE}:wrap_num_floating_point_operations", layers),
                why="the reported TFLOPs must not count layers that compute nothing",
            )
