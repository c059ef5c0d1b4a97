"""Traces of some steps."""

from collections.abc import Iterator
from typing import Any

from mindspeed.compat import megatron
from mindspeed.config import ConfigError
from mindspeed.features.base import Context, Feature, Level, bind
from mindspeed.patching import Patch
from mindspeed.profiling.options import TraceOptions

HOOKS = "mindspeed.profiling.megatron"


class Profile(Feature):
    """Trace some steps with torch's profiler and write one file a rank."""

    name = "profile"
    title = "Profile"
    group = "Tools"
    level = Level.COMPAT
    enabled_by = "profile"
    shared_fields = ("profile", "profile_step_start", "profile_step_end", "profile_ranks")
    Options = TraceOptions

    def check(self, options: Any, context: Context) -> None:
        """There are steps to trace, on ranks that exist."""
        name_of = context.name_of
        start, end = options.profile_step_start, options.profile_step_end
        if not 0 <= start < end:
            raise ConfigError(
                f"{name_of(options, 'profile_step_start')} {start} and "
                f"{name_of(options, 'profile_step_end')} {end} leave no step to trace: start with "
                "0 or more, and end after that"
            )
        if options.profile_with_memory and not options.profile_with_cpu:
            raise ConfigError(
                f"{name_of(options, 'profile_with_memory')} needs "
                f"{name_of(options, 'profile_with_cpu')}: give both"
            )
        world = context.argument("world_size")
        for rank in options.profile_ranks:
            if rank < -1 or (world is not None and rank >= world):
                last = "" if world is None else f" to {world - 1}"
                raise ConfigError(
                    f"{name_of(options, 'profile_ranks')} {rank}: give ranks from 0{last}, or -1 "
                    "for all"
                )

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap Megatron-LM's train loop where there is one; ours traces by itself."""
        if options.profile and megatron.has_training():
            yield Patch.wrap(
                "megatron.training.training:train",
                bind(f"{HOOKS}:wrap_train", options),
                why="Megatron's own profiler has none of these options",
            )
            yield Patch.wrap(
                "megatron.training.training:train_step",
                f"{HOOKS}:wrap_train_step",
                why="no callback surrounds a step",
            )
