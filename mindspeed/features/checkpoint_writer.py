"""Distributed checkpoints of older Megatron on newer torch and numpy."""

from collections.abc import Iterator
from typing import Any

import numpy

from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class CheckpointWriter(Feature):
    """megatron-core 0.12 calls functions that torch has changed and numpy removed since."""

    name = "checkpoint_writer"
    title = "Distributed checkpoints on newer torch and numpy"
    group = "Foundation"
    level = Level.COMPAT

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap Megatron's copy of torch's function; torch's own is left alone."""
        yield Patch.wrap(
            "megatron.core.dist_checkpointing.strategies.filesystem_async:_write_item",
            "mindspeed.compat.checkpoint_writer:wrap_write_item",
            why="newer torch asks for an argument that has no default",
        )
        yield Patch.wrap(
            "megatron.core.dist_checkpointing.strategies.filesystem_async:"
            "FileSystemWriterAsync.finish",
            "mindspeed.compat.checkpoint_writer:wrap_finish",
            why="torch 2.11 drops the shapes that megatron-core 0.12 adds to the metadata",
        )
        if not hasattr(numpy, "product"):
            yield Patch.add(
                "numpy:product",
                numpy.prod,
                why="megatron-core 0.12 calls it by the name that numpy 2 removed",
            )
