"""The steps of a rank that are traced."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.config import ConfigError

if TYPE_CHECKING:
    from mindspeed.device import TraceContent, Tracer

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Trace:
    """Traces the steps `first` to `last` of a rank, and writes to `folder`."""

    first: int
    last: int
    folder: str
    rank: int
    content: "TraceContent"
    _running: "Tracer | None" = None
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
            from mindspeed import device  # reading options needs no torch

            self._running = device.current().tracer(Path(self.folder), self.rank, self.content)
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
        written = self._running.stop(self._step)
        logger.info("trace of steps %d to %d in %s", self._started, self._step, written)
        self._running = None
