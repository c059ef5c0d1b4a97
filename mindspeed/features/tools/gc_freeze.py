"""Garbage collection that leaves alone what exists before the first train step.

Imported packages and the model are millions of objects. Python visits all of them whenever enough
new ones are alive, which train steps cause: 0.1 of 1.3 s of each in Megatron-LM's pretrain_gpt.py.
"""

import functools
import gc
from collections.abc import Callable, Iterator
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
            wrap_get_forward_backward_func,
            why="train loops of scripts and other projects have nothing else in common",
        )


def wrap_get_forward_backward_func(original: Callable[..., Any]) -> Callable[..., Any]:
    """Collect and freeze once, when the first train step gets its schedule."""
    is_frozen = False

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_frozen
        if not is_frozen:
            is_frozen = True
            gc.collect()  # garbage that is frozen would stay
            gc.freeze()
        return original(*args, **kwargs)

    return get_forward_backward_func
