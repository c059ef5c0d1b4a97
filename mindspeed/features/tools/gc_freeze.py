"""Garbage collection that leaves alone what exists before the first train step."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class GcFreeze(Feature):
    """Exempt all objects that exist before the first train step from garbage collection."""

    name = "gc_freeze"
    title = "Frozen garbage collection"
    group = "Tools"
    level = Level.AFFINITY
    enabled_by = "use_gc_freeze"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        use_gc_freeze: bool | None = None
        """Let Python's garbage collector visit only what train steps create. Default: on CUDA."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap what every train loop on Megatron asks for its schedule."""
        yield Patch.wrap(
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            "mindspeed.compat.gc_freeze:wrap_get_forward_backward_func",
            why="train loops of scripts and other projects have nothing else in common",
        )
