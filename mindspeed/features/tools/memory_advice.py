"""Advice when the device of a Megatron-LM script has no memory left."""

from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed import config
from mindspeed.compat import megatron
from mindspeed.features.base import Feature, Level, bind
from mindspeed.features.selection import accepts
from mindspeed.patching import Patch

HOOKS = "mindspeed.training.out_of_memory"


class MemoryAdvice(Feature):
    """Say which features would save most, in bytes, when memory runs out."""

    name = "memory_advice"
    title = "Out-of-memory advice"
    group = "Tools"
    level = Level.COMPAT
    enabled_by = "memory_advice"

    class Options(config.Options):
        """The switch."""

        memory_advice: bool = True
        """When the device has no memory left, end with one line: what the run needs part by part,
        the three flags that would save most, and what would fit."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap where a script makes its model and where it trains."""
        if not megatron.has_training():
            return
        for name, factory in (("setup_model_and_optimizer", "wrap_setup"), ("train", "wrap_train")):
            yield Patch.wrap(
                f"megatron.training.training:{name}",
                bind(f"{HOOKS}:{factory}", _arguments, _accepts),
                why="the error of an allocator names no option",
            )


def _arguments() -> Mapping[str, Any]:
    from mindspeed.features import activation

    return activation.current().context.megatron or {}


def _accepts(changes: Mapping[str, Any]) -> bool:
    from mindspeed.features import activation

    active = activation.current()
    return accepts(active.registry, active.options, active.context, changes)
