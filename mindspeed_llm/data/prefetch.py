"""Prepare items on a thread, ahead of the loop that consumes them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

AHEAD = 4
"""Items that wait, at most."""


class Prefetcher(Generic[T]):
    """Iterates over items that a thread makes, some ahead; what it raises is raised here."""

    def __init__(
        self, items: Iterator[T], *, begin: Callable[[], None] | None = None, ahead: int = AHEAD
    ) -> None:
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(ahead)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(items, begin), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item, error = self._ready.get()
        if error is None:
            return item  # type: ignore[return-value]
        self._ready.put((None, error))  # a second call raises the same
        raise error

    def close(self) -> None:
        """End the thread; nothing may be taken after that."""
        self._is_closed.set()
        while self._thread.is_alive():
            try:  # the thread may wait for a place
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _work(self, items: Iterator[T], begin: Callable[[], None] | None) -> None:
        try:
            if begin is not None:
                begin()
            for item in items:
                self._ready.put((item, None))
                if self._is_closed.is_set():
                    return
            self._ready.put((None, StopIteration()))
        except BaseException as error:  # also SystemExit: the taker decides what it means
            self._ready.put((None, error))
