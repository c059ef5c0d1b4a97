"""Ends a run in order when it is asked to: by SIGTERM, or by Ctrl-C once."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(SystemExit):
    """A run that was asked to stop before its last step; its exit code is 128 + the signal."""

    def __init__(self, number: int, iteration: int) -> None:
        self.exit_code = 128 + number
        super().__init__(self.exit_code)
        self.iteration = iteration
        """The last iteration that was trained."""


class StopRequest:
    """Notes SIGTERM and the first Ctrl-C; a second Ctrl-C has its usual effect.

    SIGTERM may come any number of times: a scheduler sends it to every process of a job, and each
    launcher among them sends it to its ranks once more.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that came first, if one did."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def came(self) -> bool:
        """Whether the run was asked to end."""
        return self.number is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])
