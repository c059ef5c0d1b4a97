"""Ends a run in order when it is asked to: SIGTERM, or Ctrl-C once."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Notes the first signal; the second one has its usual effect."""

    def __init__(self) -> None:
        self.name: str | None = None
        """The signal that came, if one did."""
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
        return self.name is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        signal.signal(number, self._previous[number])
