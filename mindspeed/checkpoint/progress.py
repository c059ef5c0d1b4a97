"""Progress of writing files: a bar on a terminal, a line at intervals elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

LOG_SECONDS = 10.0
"""Seconds between two lines."""


class ByteProgress:
    """Shows how many of the bytes have been written.

    The bar has a thread, and a process with threads cannot be forked safely, so it starts with the
    first bytes: by then the workers have been forked.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._done = 0
        self._logged = time.monotonic()
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
        """Add bytes that have been written; `total` is the number in the end."""
        self._done += size
        if self._bar is None and sys.stderr.isatty():
            self._bar = _start_bar(self._title)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, total=total)
        elif time.monotonic() - self._logged > LOG_SECONDS:
            self._logged = time.monotonic()
            share = self._done / max(1, total)
            sys.stderr.write(f"{self._title}: {share:.0%} of {total / 1e9:.2f} GB\n")
            sys.stderr.flush()


def _start_bar(title: str) -> Any:
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
    bar.add_task(title, total=None)
    return bar
