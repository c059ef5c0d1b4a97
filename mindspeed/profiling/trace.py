"""The trace of a rank: one file that Perfetto and chrome://tracing open."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.config import ConfigError

if TYPE_CHECKING:
    from torch import profiler

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Trace:
    """Traces the steps `first` to `last` of a rank and writes `folder`/trace_rank*_step*.json."""

    first: int
    last: int
    folder: str
    rank: int
    with_cpu: bool
    """False: the device only, where there is one."""
    with_stack: bool
    with_memory: bool
    record_shapes: bool
    _running: "profiler.profile | None" = None
    _started: int = 0
    _step: int = 0

    def __post_init__(self) -> None:
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"traces cannot be written to {self.folder} ({error.strerror}): choose another "
                "folder"
            ) from None

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Trace around a step, if it is one of those."""
        if self._running is None and self.first <= iteration <= self.last:
            from torch import profiler  # reading options needs no torch

            self._running = profiler.profile(
                activities=None if self.with_cpu else _without_cpu(),
                record_shapes=self.record_shapes,
                profile_memory=self.with_memory,
                with_stack=self.with_stack,
            )
            self._running.start()
            self._started = iteration
        self._step = iteration
        yield
        if iteration >= self.last:
            self.end()

    def end(self) -> None:
        """Write the trace, if one is running: the last step of a run may come before `last`."""
        if self._running is None:
            if not self._started:
                self._started = -1  # warn once
                logger.warning("no trace: steps %d to %d were not run", self.first, self.last)
            return
        self._running.stop()
        file = Path(self.folder) / f"trace_rank{self.rank}_step{self._step}.json"
        self._running.export_chrome_trace(str(file))
        logger.info("trace of steps %d to %d in %s", self._started, self._step, file)
        self._running = None


def _without_cpu() -> list[Any] | None:
    from torch import profiler

    known = profiler.supported_activities()
    return [kind for kind in known if kind is not profiler.ProfilerActivity.CPU] or None
