"""Random numbers of data sets: they follow from the seed, the epoch and the item, nothing else.

So an augmentation is the same in this process and in workers, and when a run is taken up again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset


class Place(NamedTuple):
    """An item of a data set in an epoch."""

    item: Any
    epoch: int
    fills_in: bool = False
    """There only so that all ranks have as many items: not to be trained on."""


@contextmanager
def draws_of(*key: Any) -> Iterator[None]:
    """Let torch, numpy and random draw what follows from a key; then they go on as before."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    number = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    # Not torch.manual_seed: it would also seed the devices, whose numbers are the model's.
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])


class PlacedItems(Dataset[tuple[Any, Place]]):
    """The items of a data set by their places, each made with the random numbers of its place.

    Attributes are those of the data set: a script's `worker_init_fn` may read and set them.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.__dict__.update(_dataset=dataset, _seed=seed)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, place: Place) -> tuple[Any, Place]:
        with draws_of(self._seed, "item", place):
            return self._dataset[place.item], place

    def __getattr__(self, name: str) -> Any:
        # Not __getitems__, which would pass by the numbers; not what pickle asks for.
        if name.startswith("__") or "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


class PlacedCollate:
    """Collates placed items with the random numbers of their places."""

    def __init__(self, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._collate, self._seed = collate, seed

    def __call__(self, items: Sequence[tuple[Any, Place]]) -> Any:
        with draws_of(self._seed, "batch", [place for _, place in items]):
            return self._collate([item for item, _ in items])
