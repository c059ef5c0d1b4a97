"""Which rows of a sequence each context-parallel rank holds.

A sequence is a row of tokens: one sample of a batch, or packed documents one after the other. A
layout gives each rank an ordered list of row ranges; the tensors of a rank hold exactly these rows
in this order. Lengths need not divide by anything: pieces differ by at most one row.

Megatron and Transformer Engine use zigzag: every sequence, or every packed document, is cut into
2 * size pieces, and rank r holds pieces r and 2 * size - 1 - r, so that all ranks have the same
amount of causal attention to compute.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Range = tuple[int, int]
"""Rows from the first up to, without, the second."""


@dataclass(frozen=True)
class Layout:
    """The row ranges of each rank, in the order in which its tensors hold them."""

    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def zigzag(cls, length: int, size: int) -> Layout:
        """Split one sequence over `size` ranks in zigzag order."""
        return cls.zigzag_documents((0, length), size)

    @classmethod
    def zigzag_documents(cls, bounds: Sequence[int], size: int) -> Layout:
        """Split every packed document in zigzag order.

        `bounds` are cumulative lengths, cu_seqlens with padding if there is any; what lies behind
        the last one belongs to no rank.
        """
        return _zigzag_documents(tuple(bounds), size)

    @classmethod
    def contiguous(cls, length: int, size: int) -> Layout:
        """Give each rank one range."""
        return cls(tuple((piece,) for piece in split((0, length), size)))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranges)

    @property
    def covered(self) -> tuple[Range, ...]:
        """The rows that any rank holds, in the order of the sequence."""
        return self.merge(self.size).ranges[0]

    def num_rows(self, rank: int) -> int:
        """Return how many rows a rank holds."""
        return sum(end - start for start, end in self.ranges[rank])

    def index(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the rows of a rank as one index tensor (int64), for index_select."""
        return index_of(self.ranges[rank], torch.device(device))

    def shard(self, x: Tensor, rank: int, dim: int = 0) -> Tensor:
        """Return a rank's rows of a full tensor."""
        return x.index_select(dim, self.index(rank, x.device))

    def unshard(self, x: Tensor, dim: int = 0) -> Tensor:
        """Put rows that are in the order of the ranks into the order of the sequence."""
        order = sequence_order(self, x.device)
        return x if order is None else x.index_select(dim, order)

    def merge(self, group_size: int) -> Layout:
        """Let every `group_size` consecutive ranks hold their rows together, in sequence order."""
        return _merge(self, group_size)


def split(whole: Range, parts: int) -> list[Range]:
    """Cut a range into parts whose lengths differ by at most one, longer ones first."""
    start, end = whole
    base, rest = divmod(end - start, parts)
    lengths = [base + (part < rest) for part in range(parts)]
    return list(pairwise(accumulate(lengths, initial=start)))


def partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, size: int, rank: int, host: Sequence[int] | None = None
) -> Tensor:
    """Return the rows of packed documents that a rank holds, as Transformer Engine does (int32).

    Rows behind the last document are split as one more document. `host` gives the values of
    cu_seqlens where they are known, so that the device is not read.
    """
    bounds = list(cu_seqlens.tolist() if host is None else host)
    bounds = bounds if bounds[-1] == total_tokens else [*bounds, total_tokens]
    layout = Layout.zigzag_documents(bounds, size)
    return layout.index(rank, cu_seqlens.device).to(torch.int32)


def joined(ranges: Sequence[Range]) -> list[Range]:
    """Join ranges that touch, and leave out the empty ones."""
    found: list[Range] = []
    for start, end in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        elif end > start:
            found.append((start, end))
    return found


@functools.lru_cache(maxsize=64)
def _zigzag_documents(bounds: tuple[int, ...], size: int) -> Layout:
    ranges: list[list[Range]] = [[] for _ in range(size)]
    for document in pairwise(bounds):
        pieces = split(document, 2 * size)
        for rank in range(size):
            ranges[rank] += joined([pieces[rank], pieces[2 * size - 1 - rank]])
    return Layout(tuple(map(tuple, ranges)))


@functools.lru_cache(maxsize=64)
def _merge(layout: Layout, group_size: int) -> Layout:
    groups = (
        layout.ranges[first : first + group_size] for first in range(0, layout.size, group_size)
    )
    return Layout(tuple(tuple(joined(sorted(sum(group, ())))) for group in groups))


@functools.lru_cache(maxsize=256)
def index_of(ranges: tuple[Range, ...], device: torch.device) -> Tensor:
    """Return the rows of some ranges as an index tensor; it is cached and must not be changed."""
    parts = [torch.arange(start, end) for start, end in ranges]
    return torch.cat(parts or [torch.arange(0)]).to(device)


@functools.lru_cache(maxsize=64)
def sequence_order(layout: Layout, device: torch.device) -> Tensor | None:
    """Return where each row of the sequence is among the ranks' rows; None if in order already."""
    rows = index_of(sum(layout.ranges, ()), torch.device("cpu"))
    order = torch.argsort(rows)
    return None if torch.equal(order, torch.arange(len(rows))) else order.to(device)
