"""Copies between host and device on a stream of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed.device.choice import current


class CopyStream:
    """Copies in order, beside the computation."""

    def __init__(self) -> None:
        self._device = current()
        self._stream = self._device.stream()

    def start(self, target: Tensor, source: Tensor, *after: Any) -> Any:
        """Queue a copy behind all work queued so far and some events; return its own event."""
        self._stream.wait_event(self._device.current_stream().record_event())
        for event in after:
            self._stream.wait_event(event)
        with self._device.use_stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Let the computation wait for a copy; the host does not."""
        self._device.current_stream().wait_event(event)

    @staticmethod
    def finish(event: Any) -> None:
        """Let the host wait for a copy."""
        event.synchronize()
