"""From data sets to the micro-batches of a rank: a fixed order of samples, prefetched."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Generic, TypeVar

from mindspeed.config import ConfigError
from mindspeed_llm.data.indexed import Array
from mindspeed_llm.data.shuffle import BalancedOrder, Mixture, SampleOrder

T = TypeVar("T")
Sample = dict[str, Array]

AHEAD = 4
"""Items that a prefetcher holds at most."""


class SampleStream:
    """An endless, fixed order of the samples of one or several data sets."""

    def __init__(
        self,
        data: Sequence[Sequence[Sample]],
        weights: Sequence[Fraction | int] = (),
        *,
        seed: int = 1234,
        shuffle: bool = True,
        epoch_multiple: int = 1,
        balanced_step: int | None = None,
        fingerprint: str = "",
    ) -> None:
        """Take data sets; with steps of so many samples of balanced work, these have `works`."""
        if any(len(part) == 0 for part in data):
            raise ConfigError("a data set of the mixture holds no samples")
        self.data = list(data)
        self.fingerprint = fingerprint
        """A name for the data, to detect a resume with other data."""
        self._mixture = Mixture([Fraction(w) for w in weights] or [Fraction(len(p)) for p in data])
        self._orders: list[SampleOrder | BalancedOrder] = [
            BalancedOrder(part.works, balanced_step, seed=seed + number, shuffle=shuffle)  # type: ignore[attr-defined]
            if balanced_step
            else SampleOrder(
                len(part), seed=seed + number, shuffle=shuffle, multiple=epoch_multiple
            )
            for number, part in enumerate(data)
        ]

    def locate(self, position: int) -> tuple[int, int]:
        """Return the data set, and the sample in it, at a position."""
        part, offset = self._mixture.locate(position)
        return part, self._orders[part][offset]

    def __getitem__(self, position: int) -> Sample:
        part, index = self.locate(position)
        return self.data[part][index]

    @property
    def samples_per_epoch(self) -> int:
        """How many positions it takes to see every sample about once."""
        return sum(order.epoch_size for order in self._orders)


class MicroBatches(Iterator[list[Sample]]):
    """The micro-batches of one data-parallel rank.

    A position is a number of samples that all ranks have consumed together, so a run can resume
    from it with another number of ranks or another micro-batch size, and see the same samples.
    """

    def __init__(
        self, stream: SampleStream, *, size: int, rank: int = 0, world: int = 1, consumed: int = 0
    ) -> None:
        self._stream, self._size, self._rank, self._world = stream, size, rank, world
        self.consumed = consumed

    def __next__(self) -> list[Sample]:
        start = self.consumed + self._rank * self._size
        self.consumed += self._size * self._world
        return [self._stream[start + offset] for offset in range(self._size)]


class Part(Sequence[Sample]):
    """A share of a data set."""

    def __init__(self, data: Sequence[Sample], start: float, end: float) -> None:
        self._data = data
        self._first = round(start * len(data))
        self._size = round(end * len(data)) - self._first

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        return self._data[self._first + index]

    @property
    def works(self) -> Array:
        """The attention of each sample, up to a factor."""
        works: Array = self._data.works  # type: ignore[attr-defined]
        return works[self._first : self._first + self._size]


def take_part(data: Sequence[Sample], part: tuple[float, float], name: str) -> Part:
    """Return a share of a data set, from and to; raise ConfigError if no sample is in it."""
    taken = Part(data, *part)
    if len(taken) == 0:
        raise ConfigError(
            f"--split: {100 * (part[1] - part[0]):.3g} % of the {len(data)} samples of {name} are "
            "none: give larger shares, or more data"
        )
    return taken


class Prefetcher(Generic[T]):
    """Iterates over items that a thread prepares ahead; what it raises is raised here."""

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
        """End the thread; no item may be taken afterwards."""
        self._is_closed.set()
        while self._thread.is_alive():
            try:  # the thread may be blocked by a full queue
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
        except BaseException as error:  # also SystemExit: the consumer decides what it means
            self._ready.put((None, error))
