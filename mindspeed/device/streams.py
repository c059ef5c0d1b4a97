"""Streams and events of a device that finishes each operation before the next begins."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any


class Event:
    """A point in time; always complete once recorded."""

    def __init__(self, *_: Any, enable_timing: bool = False, **__: Any) -> None:
        self._time: float | None = None
        self._timing = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """Read the clock."""
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Return: what was recorded has happened."""

    def query(self) -> bool:
        """Return True: the work is done."""
        return True

    def synchronize(self) -> None:
        """Return: what was recorded has happened."""

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds between two recorded events."""
        if self._time is None or end._time is None:
            raise RuntimeError("both events must be recorded before their distance is known")
        return (end._time - self._time) * 1e3


class Stream:
    """A queue of one: every operation is complete when the call returns."""

    device_index = 0
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the only priority there is."""
        return (0, 0)

    def wait_stream(self, stream: Stream) -> None:
        """Return: the other stream has nothing left to do."""

    def wait_event(self, event: Event) -> None:
        """Return: the event has happened."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one unless given."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Return: nothing is queued."""

    def query(self) -> bool:
        """Return True: nothing is queued."""
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
