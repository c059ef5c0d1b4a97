"""The tool section, and the trace that it asks for.

Keys of existing files that have no meaning here are accepted.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from mindspeed.config import Options

if TYPE_CHECKING:
    from torch import profiler

logger = logging.getLogger(__name__)


class TraceOptions(Options):
    """Steps to trace with torch's profiler, and what to record."""

    start_step: int = Field(default=10, ge=1)
    """First step of the trace."""
    end_step: int = Field(default=11, ge=1)
    """Step before which it ends."""
    save_path: str = "./profiling"
    """Folder for one Chrome trace a rank."""
    with_stack: bool = False
    """Record where operators are called."""
    with_memory: bool = False
    """Record memory."""
    record_shapes: bool = False
    """Record shapes."""
    with_cpu: bool = True
    """Record what the processor does, too; false: the device only, where there is one."""
    level: str | None = None
    """Accepted: torch's profiler has no levels."""
    aic_metrics_type: str | None = None
    """Accepted: it belongs to the profiler of one device."""
    data_simplification: bool = False
    """Accepted: there is one file, the trace."""
    analyse_flag: bool = True
    """Accepted: the trace is ready to be opened."""

    @model_validator(mode="after")
    def _has_steps(self) -> "TraceOptions":
        if self.end_step <= self.start_step:
            raise ValueError(
                f"end_step: {self.end_step} leaves no step to trace: it is the first one after "
                f"start_step: {self.start_step} that is not traced"
            )
        return self


class DynamicOptions(Options):
    """Accepted: only static traces are made."""

    config_path: str | None = None
    """Accepted, without effect."""


class ProfileOptions(Options):
    """Whether and where to trace."""

    enable: bool = False
    """Trace."""
    ranks: tuple[int, ...] = (0,)
    """Ranks that trace; -1 for all."""
    profile_type: Literal["static"] = "static"
    """Steps that are known before."""
    static_param: TraceOptions = TraceOptions()
    """What to trace."""
    dynamic_param: DynamicOptions = DynamicOptions()
    """Accepted, without effect."""


class MemoryProfileOptions(Options):
    """A profile of memory alone, which there is not; a section that is switched off is accepted."""

    enable: bool = False
    """Refused: use with_memory of profile."""
    start_step: int | None = None
    """Accepted, without effect."""
    end_step: int | None = None
    """Accepted, without effect."""
    save_path: str | None = None
    """Accepted, without effect."""
    dump_ranks: tuple[int, ...] = ()
    """Accepted, without effect."""
    stacks: str | None = None
    """Accepted, without effect."""
    max_entries: int | None = None
    """Accepted, without effect."""
    mem_info: bool | None = None
    """Accepted, without effect."""

    @field_validator("enable")
    @classmethod
    def _is_off(cls, value: bool) -> bool:
        if value:
            raise ValueError("there is no such profile: use with_memory: true of profile")
        return value


class FeatureOptions(Options):
    """Where another script of existing tool files writes."""

    save_path: str | None = None
    """Accepted, without effect."""


class ToolConfig(Options):
    """The tool section."""

    profile: ProfileOptions = ProfileOptions()
    """Trace of some steps."""
    memory_profile: MemoryProfileOptions = MemoryProfileOptions()
    """Accepted where it is switched off."""
    sorafeature: FeatureOptions = FeatureOptions()
    """Accepted, without effect."""


class Trace:
    """Traces the steps from start_step until before end_step, on the ranks that are named."""

    def __init__(self, tool: Any, rank: int) -> None:
        profile: Any = getattr(tool, "profile", None)
        is_asked = getattr(profile, "enable", False)
        self._how = profile.static_param if is_asked and _is_named(rank, profile.ranks) else None
        self._rank = rank
        self._running: profiler.profile | None = None

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Trace around a step, if it is one of those."""
        how = self._how
        if how is not None and iteration == how.start_step:
            from torch import profiler  # reading the section needs no torch

            self._running = profiler.profile(
                activities=None if how.with_cpu else _without_cpu(),
                record_shapes=how.record_shapes,
                profile_memory=how.with_memory,
                with_stack=how.with_stack,
            )
            self._running.start()
        yield
        if how is not None and iteration >= how.end_step - 1:
            self.end(iteration)

    def end(self, iteration: int) -> None:
        """Write the trace, if one is running: the last step of a run may come before end_step."""
        if self._how is None or self._running is None:
            return
        self._running.stop()
        file = Path(self._how.save_path) / f"trace_rank{self._rank}_step{iteration}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(file))
        logger.info("trace of steps %d to %d in %s", self._how.start_step, iteration, file)
        self._running = None


def _without_cpu() -> list[Any] | None:
    from torch import profiler

    known = profiler.supported_activities()
    return [kind for kind in known if kind is not profiler.ProfilerActivity.CPU] or None


def _is_named(rank: int, ranks: tuple[int, ...]) -> bool:
    return rank in ranks or -1 in ranks
