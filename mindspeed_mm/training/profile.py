"""A trace of some steps, as the tool section asks for it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import profiler

logger = logging.getLogger(__name__)


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
    known = profiler.supported_activities()
    return [kind for kind in known if kind is not profiler.ProfilerActivity.CPU] or None


def _is_named(rank: int, ranks: tuple[int, ...]) -> bool:
    return rank in ranks or -1 in ranks
