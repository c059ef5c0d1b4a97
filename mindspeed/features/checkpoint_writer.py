"""Distributed checkpoints of older Megatron on newer torch."""

from collections.abc import Iterator
from typing import Any

from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class CheckpointWriter(Feature):
    """megatron-core 0.12 calls a function of torch that has gained an argument since."""

    name = "checkpoint_writer"
    title = "Distributed checkpoints on newer torch"
    group = "Foundation"
    level = Level.COMPAT

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap Megatron's copy of torch's function; torch's own is left alone."""
        yield Patch.wrap(
            "megatron.core.dist_checkpointing.strategies.filesystem_async:_write_item",
            "mindspeed.compat.checkpoint_writer:wrap_write_item",
            why="newer torch asks for an argument that has no default",
        )
