"""The tool section, and the trace that it asks for.

Keys of existing files that have no meaning here are accepted.
"""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mindspeed.config import SectionOptions
from mindspeed.profiling import Trace


class TraceOptions(SectionOptions):
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
    level: Literal["level_none", "level0", "level1", "level2"] = "level0"
    """How much the profiler of an NPU records; torch's records kernels and communication."""
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


class DynamicOptions(SectionOptions):
    """Accepted: only static traces are made."""

    config_path: str | None = None
    """Accepted, without effect."""


class ProfileOptions(SectionOptions):
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


class MemoryProfileOptions(SectionOptions):
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


class FeatureOptions(SectionOptions):
    """Where another script of existing tool files writes."""

    save_path: str | None = None
    """Accepted, without effect."""


class ToolConfig(SectionOptions):
    """The tool section."""

    profile: ProfileOptions = ProfileOptions()
    """Trace of some steps."""
    memory_profile: MemoryProfileOptions = MemoryProfileOptions()
    """Accepted where it is switched off."""
    sorafeature: FeatureOptions = FeatureOptions()
    """Accepted, without effect."""


def trace_of(tool: Any, rank: int) -> Trace | None:
    """Return the trace that the tool section asks a rank for."""
    profile: Any = getattr(tool, "profile", None)
    if not getattr(profile, "enable", False) or not {rank, -1}.intersection(profile.ranks):
        return None
    from mindspeed.device import TraceContent  # reading options needs no torch

    how = profile.static_param
    return Trace(
        first=how.start_step,
        last=how.end_step - 1,
        folder=how.save_path,
        rank=rank,
        content=TraceContent(
            level=how.level,
            with_cpu=how.with_cpu,
            with_stack=how.with_stack,
            with_memory=how.with_memory,
            record_shapes=how.record_shapes,
        ),
    )
