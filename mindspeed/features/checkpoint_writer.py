"""Distributed checkpoints: on newer torch and numpy, and when a run is stopped or killed."""

from collections.abc import Iterator
from typing import Any

import numpy

from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class CheckpointWriter(Feature):
    """Megatron 0.12 calls what torch and numpy have changed since; all leave a process behind."""

    name = "checkpoint_writer"
    title = "Writers of distributed checkpoints"
    group = "Foundation"
    level = Level.COMPAT

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap Megatron's copy of torch's function and its writer; torch's own is left alone."""
        yield Patch.wrap(
            "megatron.core.dist_checkpointing.strategies.filesystem_async:"
            "FileSystemWriterAsync.prepare_write_data",
            "mindspeed.compat.checkpoint_reports:wrap_prepare_write_data",
            why="a process that it starts ends when all are asked to stop, and outlives its rank",
        )
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
