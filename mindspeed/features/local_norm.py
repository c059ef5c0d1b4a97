"""Norms of Megatron's local layer specs, without apex and with sequence parallelism."""

from collections.abc import Iterator
from typing import Any

from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class LocalNorm(Feature):
    """Local specs name their norms by class, which neither a spec nor an argument can change."""

    name = "local_norm"
    title = "Norms of local specs"
    group = "Foundation"
    level = Level.COMPAT

    def patches(self, options: Any) -> Iterator[Patch]:
        """Serve what torch's norms are refused for, and end a block as its layers begin."""
        yield Patch.wrap(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            "mindspeed.compat.norms:wrap_torch_norm",
            why="it refuses sequence parallelism, which needs only a mark on the parameters",
        )
        yield Patch.wrap(
            "megatron.core.transformer.transformer_block:_get_block_submodules",
            "mindspeed.compat.norms:wrap_block_submodules",
            why="a block of local layers would end with Transformer Engine's norm",
        )
