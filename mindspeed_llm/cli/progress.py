"""Progress of long work: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

EVERY = 10.0
"""Seconds between lines."""


class ByteProgress:
    """Shows how many of the bytes to be written have been."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._done = 0
        self._told = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> "ByteProgress":
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
            )
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(self._what, total=None)
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
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, total=total)
        elif time.monotonic() - self._told > EVERY:
            self._told = time.monotonic()
            share = self._done / max(1, total)
            print(f"{self._what}: {share:.0%} of {total / 1e9:.2f} GB", file=sys.stderr, flush=True)
