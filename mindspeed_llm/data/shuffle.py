"""Shuffling and mixing: the sample at a position is computed, never stored, so it cannot be stale.

Neither depends on a library's random numbers: a run can be resumed years later and see the same
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from mindspeed_llm.data.indexed import Array

MASK = (1 << 64) - 1
ROUNDS = 4


class SampleOrder:
    """The samples 0 .. size-1, shuffled differently in every epoch.

    With `multiple` an epoch is padded to a multiple of that many with samples 0, 1, ...
    """

    def __init__(
        self, size: int, *, seed: int = 1234, shuffle: bool = True, multiple: int = 1
    ) -> None:
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self.epoch_size = -(-size // multiple) * multiple
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self.epoch_size)
        if index >= self._size:
            return (index - self._size) % self._size
        return self._permute(epoch, index) if self._shuffle else index

    def _permute(self, epoch: int, index: int) -> int:
        """Permute an index with a Feistel network, which is a permutation for any hash.

        It permutes the next power of four; a value outside is permuted again until it is inside.
        """
        mask = (1 << self._half) - 1
        while True:
            left, right = index >> self._half, index & mask
            for step in range(ROUNDS):
                key = _mix(self._seed ^ _mix(epoch * ROUNDS + step))
                left, right = right, left ^ (_mix(key ^ right) & mask)
            index = left << self._half | right
            if index < self._size:
                return index


class BalancedOrder:
    """Steps in which all pairs of samples have about the same work; every epoch shuffles the steps.

    The sample with the most work is paired with that with the least, and so on; a step consists of
    pairs of about equal work, their first halves in front. Ranks that take an even number of
    micro-batches of a step get both samples of their pairs. Where samples do not fill the last step
    some of them, spread over all, come twice.
    """

    def __init__(self, works: Array, step: int, *, seed: int = 1234, shuffle: bool = True) -> None:
        size = -(-len(works) // step) * step
        more = np.arange(size - len(works)) * len(works) // max(1, size - len(works))
        samples = np.concatenate([np.arange(len(works)), more])
        ranking = samples[np.argsort(works[samples], kind="stable")]
        pairs = np.stack([ranking[::-1][: size // 2], ranking[: size // 2]])
        pairs = pairs[:, np.argsort(works[pairs].sum(0), kind="stable")]
        self._rows = pairs.reshape(2, -1, step // 2).transpose(1, 0, 2).reshape(-1, step)
        self._steps = SampleOrder(len(self._rows), seed=seed, shuffle=shuffle)
        self.epoch_size = size

    def __getitem__(self, position: int) -> int:
        number, offset = divmod(position, self._rows.shape[1])
        return int(self._rows[self._steps[number], offset])


class Mixture:
    """Assigns positions to several data sets, always as close to the weights as possible."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self._weights = list(weights)

    def locate(self, position: int) -> tuple[int, int]:
        """Return the data set at a position, and the number of its earlier positions.

        The first data set gets the positions at which its exact share passes a whole number; the
        others split the rest in the same way.
        """
        for part in range(len(self._weights) - 1):
            share = self._weights[part] / sum(self._weights[part:], Fraction())
            before = int(position * share)
            if int((position + 1) * share) > before:
                return part, before
            position -= before
        return len(self._weights) - 1, position


def _mix(value: int) -> int:
    """Scatter 64 bits (the finalizer of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31
