"""What records the kernels of a device: torch's profiler, unless a device has another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class TraceContent:
    """What a trace holds beside kernels and communication."""

    level: str = "level0"
    """How much a profiler with levels records; torch's has none."""
    with_cpu: bool = False
    """What the processor does, too; it always is where there is no other device."""
    with_stack: bool = False
    with_memory: bool = False
    record_shapes: bool = False


class Tracer(Protocol):
    """Records between `start` and `stop`, once."""

    def start(self) -> None:
        """Record from here on."""

    def stop(self, step: int) -> Path:
        """Write what was recorded up to a step; return the file, or the folder of files."""


class TorchTracer:
    """Writes one file, which Perfetto and chrome://tracing open."""

    def __init__(self, folder: Path, rank: int, content: TraceContent) -> None:
        from torch import profiler

        known: Any = profiler.supported_activities  # without types
        others = [kind for kind in known() if kind is not profiler.ProfilerActivity.CPU]
        self._folder, self._rank = folder, rank
        self._profiler: Any = profiler.profile(
            activities=None if content.with_cpu else others or None,
            record_shapes=content.record_shapes,
            profile_memory=content.with_memory,
            with_stack=content.with_stack,
        )

    def start(self) -> None:
        """Record from here on."""
        self._profiler.start()

    def stop(self, step: int) -> Path:
        """Write the file."""
        self._profiler.stop()
        file = self._folder / f"trace_rank{self._rank}_step{step}.json"
        self._profiler.export_chrome_trace(str(file))
        return file
