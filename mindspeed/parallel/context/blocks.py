"""Which rows of queries attend to which rows of keys, as a list of kernel calls.

Two ranks hold rows of the same documents. Wherever a range of queries and a range of keys meet in a
document, causality and the sliding window leave them all visible, none, or a band of them; the
ranges are trimmed to what is visible, and the band becomes the window of a kernel, with the last
query aligned to the last key. Every visible pair is in exactly one block.

In zigzag order, blocks of neighbouring pieces join into what flash attention is fastest at: one
causal call for a rank's own keys, one full call for the keys of another rank. The same block of all
packed documents is one call.

This is arithmetic on the host: no tensor is read.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from mindspeed.parallel.context.layout import Layout, Range

Window = tuple[int, int]
"""Neighbours to the left and to the right that a query sees, -1 for all."""
FULL, CAUSAL = (-1, -1), (-1, 0)


@dataclass(frozen=True)
class Spans:
    """The row ranges of the documents in a sequence, in ascending order; the rest is padding."""

    ranges: tuple[Range, ...]

    @classmethod
    def whole(cls, length: int) -> Spans:
        """Describe a sequence that is one document."""
        return cls(((0, length),))

    @classmethod
    def packed(cls, bounds: Sequence[int], padded_bounds: Sequence[int] | None = None) -> Spans:
        """Read cumulative lengths; where there is padding, the padded ones give the starts."""
        starts = (bounds if padded_bounds is None else padded_bounds)[:-1]
        lengths = (end - start for start, end in pairwise(bounds))
        return cls(tuple((start, start + n) for start, n in zip(starts, lengths)))


class Block(NamedTuple):
    """Queries that attend to keys within a window."""

    q: Range
    """Rows of the queries in their tensor."""
    k: Range
    """Rows of the keys in theirs."""
    window: Window
    """As kernels take it: the last query is aligned to the last key."""
    q_start: int
    """Where the first query is in the sequence."""
    k_start: int
    """Where the first key is in the sequence; the others follow it unless blocks were joined."""


@dataclass(frozen=True, eq=False)
class Call:
    """One kernel call: blocks of one window, of which each row of queries is in one at most."""

    blocks: tuple[Block, ...]

    @property
    def window(self) -> Window:
        """The window of all blocks."""
        return self.blocks[0].window

    @functools.cached_property
    def q(self) -> tuple[Range, ...]:
        """The rows of queries, one range a block."""
        return tuple(block.q for block in self.blocks)

    @functools.cached_property
    def k(self) -> tuple[Range, ...]:
        """The rows of keys, one range a block."""
        return tuple(block.k for block in self.blocks)


class _Segment(NamedTuple):
    """A range of one document that a rank holds: where in its tensor, where in the sequence."""

    local: Range
    start: int
    end: int


@dataclass(frozen=True)
class Held:
    """Some rows of each rank: where they are in the sequence, and where in the rank's tensors."""

    layout: Layout
    local: tuple[tuple[Range, ...], ...]

    @classmethod
    def of(cls, ranks: Sequence[list[_Segment]]) -> Held:
        """Describe segments of each rank, in the order of its tensors."""
        ranks = [sorted(segments) for segments in ranks]
        ranges = (tuple((one.start, one.end) for one in segments) for segments in ranks)
        return cls(Layout(tuple(ranges)), tuple(tuple(s.local for s in one) for one in ranks))


@functools.lru_cache(maxsize=64)
def shared_and_whole(spans: Spans, layout: Layout) -> tuple[Held, Held]:
    """Return the rows of documents that several ranks hold, and of those that one holds alone.

    A rank needs no keys of others but the first ones. Padding is in neither.
    """
    held = [_segments(spans, ranges) for ranges in layout.ranges]
    holders = Counter(number for one in held for number in one)
    parts: tuple[list[list[_Segment]], ...] = ([], [])
    for one in held:
        for part, is_shared in zip(parts, (True, False)):
            part.append([x for n in one if (holders[n] > 1) == is_shared for x in one[n]])
    return Held.of(parts[0]), Held.of(parts[1])


@functools.lru_cache(maxsize=1024)
def plan(
    spans: Spans,
    q_ranges: tuple[Range, ...],
    k_ranges: tuple[Range, ...],
    window: Window,
    is_joined: bool = True,
) -> tuple[Call, ...]:
    """Return the calls by which queries of some rows attend to keys of some rows.

    Blocks that are not joined consist of consecutive positions, as a bias needs them.
    """
    of_q, of_k = _segments(spans, q_ranges), _segments(spans, k_ranges)
    calls: dict[tuple[Window, int], list[Block]] = {}
    for document in sorted(of_q.keys() & of_k.keys()):
        blocks = list(_blocks(of_q[document], of_k[document], window, is_joined))
        for number, block in enumerate(blocks):
            calls.setdefault((block.window, number), []).append(block)
    if is_joined:
        return tuple(Call(tuple(blocks)) for blocks in calls.values())
    return tuple(Call((block,)) for blocks in calls.values() for block in blocks)


def _segments(spans: Spans, ranges: tuple[Range, ...]) -> dict[int, list[_Segment]]:
    """Return what is held of each document, by the document's number."""
    ends = [end for _, end in spans.ranges]
    found: dict[int, list[_Segment]] = {}
    local = 0
    for first, last in ranges:
        number = bisect_right(ends, first)
        while number < len(ends) and spans.ranges[number][0] < last:
            start, end = max(first, spans.ranges[number][0]), min(last, ends[number])
            if start < end:
                rows = local + start - first, local + end - first
                found.setdefault(number, []).append(_Segment(rows, start, end))
            number += 1
        local += last - first
    return found


def _blocks(
    of_q: list[_Segment], of_k: list[_Segment], window: Window, is_joined: bool
) -> Iterator[Block]:
    if is_joined and window == CAUSAL and of_q == of_k and _is_dense(of_q):
        # In ascending order, causality between rows is causality between positions.
        rows = of_q[0].local[0], of_q[-1].local[1]
        yield Block(rows, rows, CAUSAL, of_q[0].start, of_q[0].start)
        return
    blocks = [block for q in of_q for k in of_k if (block := _trim(q, k, window)) is not None]
    yield from _join(blocks) if is_joined else blocks


def _is_dense(segments: list[_Segment]) -> bool:
    return all(
        one.local[1] == other.local[0] and one.end <= other.start
        for one, other in pairwise(segments)
    )


def _trim(q: _Segment, k: _Segment, window: Window) -> Block | None:
    """Return the block of the queries and keys that see each other, None if there are none."""
    left, right = window
    q_start, q_end, k_start, k_end = q.start, q.end, k.start, k.end
    if right >= 0:
        q_start = max(q_start, k_start - right)
    if left >= 0:
        q_end = min(q_end, k_end + left)
        k_start = max(k_start, q_start - left)
    if right >= 0:
        k_end = min(k_end, q_end + right)
    num_q, num_k = q_end - q_start, k_end - k_start
    if num_q <= 0 or num_k <= 0:
        return None
    # The last query is at q_end - 1; kernels take it to be at the last key.
    left = -1 if left < 0 else left + k_end - q_end
    right = -1 if right < 0 else right + q_end - k_end
    window = (-1 if left >= num_k - 1 else left), (-1 if right >= num_q - 1 else right)
    q_row, k_row = q.local[0] + q_start - q.start, k.local[0] + k_start - k.start
    return Block((q_row, q_row + num_q), (k_row, k_row + num_k), window, q_start, k_start)


def _join(blocks: list[Block]) -> list[Block]:
    """Join full blocks that share their queries and touch in the keys, then the other way round."""
    blocks = _join_along("k", "q", blocks)
    blocks.sort(key=lambda block: (block.k, block.q))
    return _join_along("q", "k", blocks)


def _join_along(dim: str, same: str, blocks: list[Block]) -> list[Block]:
    joined: list[Block] = []
    for block in blocks:
        if joined and _touches(joined[-1], block, dim, same):
            rows: Any = {dim: (getattr(joined.pop(), dim)[0], getattr(block, dim)[1])}
            block = block._replace(**rows)
        joined.append(block)
    return joined


def _touches(one: Block, other: Block, dim: str, same: str) -> bool:
    return (
        one.window == other.window == FULL
        and getattr(one, same) == getattr(other, same)
        and getattr(one, dim)[1] == getattr(other, dim)[0]
    )
