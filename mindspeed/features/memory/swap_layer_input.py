"""Inputs of recomputed layers that wait for backward in host memory."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.memory.megatron import check_full_recompute
from mindspeed.patching import Patch

_EXCLUDED = {
    "cpu_offloading": "--cpu-offloading",
    "distribute_saved_activations": "--distribute-saved-activations",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
}
"""Megatron's arguments that store or split the inputs of layers in another way."""


class SwapLayerInput(Feature):
    """Keep the inputs of layers that are recomputed as a whole in host memory."""

    name = "swap_layer_input"
    title = "Layer input swap"
    group = "Memory"
    level = Level.COMPAT
    enabled_by = "swap_layer_input"

    class Options(config.Options):
        """The switch."""

        swap_layer_input: bool = False
        """Keep the inputs of fully recomputed layers in pinned host memory between forward and
        backward. No effect on a cpu."""

    def check(self, options: Any, context: Context) -> None:
        """There must be such layers, whose inputs nothing else splits or moves."""
        if context.megatron is None:
            return
        flag = context.spelling.name_of("swap_layer_input")
        check_full_recompute(flag, context)
        for other, name in _EXCLUDED.items():
            if context.argument(other, False):
                raise ConfigError(f"{flag} and {name} exclude each other: drop one")

    def patches(self, options: Any) -> Iterator[Patch]:
        """Mark new blocks, and wrap what checkpoints their layers."""
        package = "mindspeed.memory.swap_layer_input"
        block = "megatron.core.transformer.transformer_block:TransformerBlock"
        yield Patch.wrap(
            f"{block}.__init__",
            f"{package}:wrap_transformer_block_init",
            why="each block has its own order of layers in backward",
        )
        yield Patch.wrap(
            f"{block}._checkpointed_forward",
            f"{package}:wrap_checkpointed_forward",
            why="the function that checkpoints a layer does not know the block",
        )
        yield Patch.wrap(
            "megatron.core.tensor_parallel.random:checkpoint",
            f"{package}:wrap_checkpoint",
            why="it saves the input of a layer; no argument says where",
        )
