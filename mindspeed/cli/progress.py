"""Progress of long work: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

EVERY = 10.0
"""Seconds between lines."""


class ByteProgress:
    """Shows how many of the bytes to be written have been.

    The bar has a thread, and a process with threads cannot be copied, so it comes with the first
    bytes: whoever copies this process for its workers has done so by then.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._done = 0
        self._told = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> "ByteProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, size: int, total: int) -> None:
        """Count bytes that have been written; `total` is what will be."""
        self._done += size
        if self._bar is None and sys.stderr.isatty():
            self._bar = _start_bar(self._what)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, total=total)
        elif time.monotonic() - self._told > EVERY:
            self._told = time.monotonic()
            share = self._done / max(1, total)
            print(f"{self._what}: {share:.0%} of {total / 1e9:.2f} GB", file=sys.stderr, flush=True)


def _start_bar(what: str) -> Any:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    bar.add_task(what, total=None)
    return bar
