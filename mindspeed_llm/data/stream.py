"""The order in which training sees samples, as a function of the position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from mindspeed.config import ConfigError
from mindspeed_llm.data.indexed import Array
from mindspeed_llm.data.order import Mixture, SampleOrder

Sample = dict[str, Array]


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
        fingerprint: str = "",
    ) -> None:
        if any(len(part) == 0 for part in data):
            raise ConfigError("a data set of the mixture holds no samples")
        self.data = list(data)
        self.fingerprint = fingerprint
        """A name for the data, to notice when training goes on with other data."""
        self._mixture = Mixture([Fraction(w) for w in weights] or [Fraction(len(p)) for p in data])
        self._orders = [
            SampleOrder(len(part), seed=seed + place, shuffle=shuffle, multiple=epoch_multiple)
            for place, part in enumerate(data)
        ]

    def locate(self, position: int) -> tuple[int, int]:
        """Return which data set, and which of its samples, stands at a position."""
        part, place = self._mixture.locate(position)
        return part, self._orders[part][place]

    def __getitem__(self, position: int) -> Sample:
        part, index = self.locate(position)
        return self.data[part][index]

    @property
    def samples_per_epoch(self) -> int:
        """How many positions it takes to see every sample about once."""
        return sum(order.epoch_size for order in self._orders)


class MicroBatches(Iterator[list[Sample]]):
    """The micro-batches of one data-parallel rank.

    A position is a number of samples that all ranks have consumed together, so training can go on
    from it with another number of ranks or another micro-batch size, and see what it would have.
    """

    def __init__(
        self, stream: SampleStream, *, size: int, rank: int = 0, world: int = 1, consumed: int = 0
    ) -> None:
        self._stream, self._size, self._rank, self._world = stream, size, rank, world
        self.consumed = consumed

    def __next__(self) -> list[Sample]:
        start = self.consumed + self._rank * self._size
        self.consumed += self._size * self._world
        return [self._stream[start + place] for place in range(self._size)]


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
