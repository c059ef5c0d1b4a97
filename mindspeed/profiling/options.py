"""The options of a trace, and the trace that they ask for."""

from typing import Any, Literal

from mindspeed.config import Options
from mindspeed.profiling.trace import Trace


class TraceOptions(Options):
    """Which steps to trace, on which ranks, and what to record."""

    profile: bool = False
    """Trace some steps with torch's profiler: one file a rank."""
    profile_step_start: int = 10
    """Steps before the first one that is traced."""
    profile_step_end: int = 12
    """Last step that is traced."""
    profile_ranks: tuple[int, ...] = (-1,)
    """Ranks that are traced; -1 for all."""
    profile_level: Literal["level0", "level1", "level2"] = "level0"
    """How much the profiler of an NPU records; torch's records kernels and communication."""
    profile_with_cpu: bool = False
    """Record what the processor does, too."""
    profile_with_stack: bool = False
    """Record where operators are called."""
    profile_with_memory: bool = False
    """Record memory; needs --profile-with-cpu."""
    profile_record_shapes: bool = False
    """Record shapes."""
    profile_save_path: str = "./profile_dir"
    """Folder of the traces."""


def trace_of(options: Any, rank: int) -> Trace | None:
    """Return the trace of a rank, if it is one of those that are traced."""
    if not options.profile or not {rank, -1}.intersection(options.profile_ranks):
        return None
    from mindspeed.device import TraceContent  # reading options needs no torch

    return Trace(
        first=options.profile_step_start + 1,
        last=options.profile_step_end,
        folder=options.profile_save_path,
        rank=rank,
        content=TraceContent(
            level=options.profile_level,
            with_cpu=options.profile_with_cpu,
            with_stack=options.profile_with_stack,
            with_memory=options.profile_with_memory,
            record_shapes=options.profile_record_shapes,
        ),
    )
