"""Packed documents that stay whole on a rank wherever all ranks still have the same to do.

Cutting every document into pieces for all ranks (zigzag) makes short documents shorter than kernels
are efficient at, and every rank needs keys of every other. Here ranks have equal numbers of rows
and, within a few percent, equal causal attention, and each rank cuts at most two documents.

A row of a document of n rows sees n / 2 keys on average, and so do the rows of any piece together
with the rows of its mirror image in the document. So what counts of a rank's share of a document is
its number of rows. Documents are laid out in one line, the longest first. One rank after the other
takes rows from both ends of the line, as many from the long documents as give its rows the average
work of all that is left: what remains has the same average, and so has the last rank.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from mindspeed.parallel.context.layout import Layout, Range, joined, split

TOLERANCE = 0.01
"""Share of its work by which a rank may miss the average, to cut between documents."""


def whole_documents(bounds: Sequence[int], size: int) -> Layout:
    """Give ranks equal rows and about equal attention, with documents as whole as possible.

    `bounds` are cumulative lengths; what lies behind the last one belongs to no rank.
    """
    return _whole_documents(tuple(bounds), size)


@functools.lru_cache(maxsize=64)
def _whole_documents(bounds: tuple[int, ...], size: int) -> Layout:
    documents = sorted(pairwise(bounds), key=lambda rows: rows[0] - rows[1])
    line = _Line([end - start for start, end in documents])
    ranges: list[list[Range]] = [[] for _ in range(size)]
    left = list(documents)
    for rank, (first, last) in enumerate(split((0, line.ends[-1]), size)):
        for number, rows in line.take(last - first):
            start, end = left[number]
            front, back = start + rows // 2, end - (rows - rows // 2)
            ranges[rank] += [(start, front), (back, end)]
            left[number] = front, back
    return Layout(tuple(tuple(joined(sorted(one))) for one in ranges))


class _Line:
    """The rows of documents, the longest first, that no rank has taken from either end."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self.ends = list(accumulate(lengths, initial=0))
        self._works = list(accumulate((n * n for n in lengths), initial=0))
        self._low, self._high = 0, self.ends[-1]

    def take(self, rows: int) -> Iterator[tuple[int, int]]:
        """Take so many rows, and yield how many of which document."""
        front = self._num_front(rows)
        low, high = self._low, self._high
        self._low, self._high = low + front, high - (rows - front)
        yield from self._documents(low, self._low)
        yield from self._documents(self._high, high)

    def _documents(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        number = bisect_right(self.ends, start) - 1
        while start < end:
            stop = min(end, self.ends[number + 1])
            if stop > start:
                yield number, stop - start
            start, number = stop, number + 1

    def _num_front(self, rows: int) -> int:
        """Return how many rows to take from the long documents, the others from the short ones."""
        total = self._work(self._low, self._high)
        average = total * rows / max(1, self._high - self._low)

        def work(front: int) -> int:
            back = self._high - (rows - front)
            return self._work(self._low, self._low + front) + self._work(back, self._high)

        counts = range(rows + 1)  # work grows with the count
        exact = min(bisect_left(counts, average, key=work), rows)
        least = bisect_left(counts, average * (1 - TOLERANCE), key=work)
        most = bisect_right(counts, average * (1 + TOLERANCE), key=work) - 1
        between = {end - origin for origin in (self._low, self._high - rows) for end in self.ends}
        choices = [exact, *(count for count in between if least <= count <= most)]
        return min(choices, key=lambda n: (self._num_cuts(n, rows), abs(work(n) - average), n))

    def _num_cuts(self, front: int, rows: int) -> int:
        return sum(
            at != self.ends[bisect_left(self.ends, at)]
            for at in (self._low + front, self._high - rows + front)
        )

    def _work(self, start: int, end: int) -> int:
        return self._work_up_to(end) - self._work_up_to(start)

    def _work_up_to(self, at: int) -> int:
        number = min(bisect_right(self.ends, at), len(self._lengths)) - 1
        return self._works[number] + (at - self.ends[number]) * self._lengths[number]


DOCUMENT_LAYOUTS: Mapping[str, Callable[[Sequence[int], int], Layout]] = {
    "zigzag": Layout.zigzag_documents,
    "whole": whole_documents,
}
"""The layouts of packed documents, by the values of `--cp-document-layout`."""
