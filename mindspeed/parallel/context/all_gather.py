"""Attention to keys and values that every rank gathers from all ranks, forward and backward.

Memory grows with the whole sequence, messages are fewer and larger than those of a ring. Gradients
of keys and values are summed by a reduce-scatter. Only rows of documents that several ranks hold
are gathered; a rank attends to documents that it holds alone by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed.distributed.collectives import (
    all_gather_uneven,
    reduce_scatter_uneven,
    resolve_group,
)
from mindspeed.parallel.context.blocks import Held, Spans, shared_and_whole
from mindspeed.parallel.context.exchange import Arrived, Exchange, Members, ReturningGradients
from mindspeed.parallel.context.layout import sequence_order
from mindspeed.parallel.context.merge import Rows, RowSums, pack, packed_size, unpack


@dataclass(frozen=True)
class Gather(Exchange):
    """Ranks that gather the keys and values of documents that they share, in one step."""

    spans: Spans

    @property
    def parts(self) -> list[tuple[Held, bool]]:
        """What is attended to in each step: whole documents, then shared ones (True).

        Ranks have the same steps; a rank may have no rows in one.
        """
        shared, whole = shared_and_whole(self.spans, self.layout)
        return [part for part in ((whole, False), (shared, True)) if any(part[0].local)]

    def arriving(self, k: Tensor, v: Tensor) -> Iterator[Arrived]:
        """Yield this rank's documents, then the shared ones of all ranks, rank after rank."""
        for part, is_shared in self.parts:
            mine = Rows.of(part.local[self.rank], k.device)
            kv = [mine.take(k), mine.take(v)]
            if is_shared:
                gathered = gather_rows(kv, Members(self.group, part.layout))
                order = sequence_order(part.layout, k.device)
                yield Arrived(part.layout.covered, gathered, order)
            else:
                yield Arrived(part.layout.ranges[self.rank], kv)

    def returning(self, k: Tensor, v: Tensor) -> ReturningGradients:
        """Return gradients that are summed by a reduce-scatter."""
        return _ScatteredGradients(self, k, v)


class _ScatteredGradients(ReturningGradients):
    def __init__(self, gather: Gather, k: Tensor, v: Tensor) -> None:
        self._gather, self._kv, self._parts = gather, (k, v), gather.parts
        self._sums: list[RowSums] = []

    def sums(self, step: int) -> RowSums:
        """Return sums for this rank's documents, or for the shared rows of all ranks."""
        part, is_shared = self._parts[step]
        rows = Members(self._gather.group, part.layout).rows
        return RowSums(self._kv, sum(rows) if is_shared else rows[self._gather.rank])

    def send(self, step: int, sums: RowSums) -> None:
        """Keep the sums of a step."""
        self._sums.append(sums)

    def result(self) -> list[Tensor]:
        """Sum over the ranks, and return the gradients of this rank's rows."""
        rank, found = self._gather.rank, []
        for (part, is_shared), sums in zip(self._parts, self._sums):
            grads = sums.totals()
            if is_shared:
                grads = scatter_rows(grads, Members(self._gather.group, part.layout))
            found.append((Rows.of(part.local[rank], grads[0].device), grads))
        if len(found) == 1 and found[0][0].is_all(len(self._kv[0])):
            return [grad.to(x.dtype) for grad, x in zip(found[0][1], self._kv)]
        result = [torch.zeros_like(x) for x in self._kv]
        for rows, grads in found:
            for x, grad in zip(result, grads):
                rows.put(x, grad)
        return result


def gather_rows(tensors: Sequence[Tensor], members: Members) -> list[Tensor]:
    """Return the rows of all ranks, one rank after the other; one message for all tensors."""
    sizes = [packed_size(tensors, n) for n in members.rows]
    flat = all_gather_uneven(pack(*tensors), sizes, resolve_group(members.group))
    parts = zip(*(unpack(x, tensors, n) for x, n in zip(flat, members.rows)))
    return [torch.cat(part) for part in parts]


def scatter_rows(tensors: Sequence[Tensor], members: Members) -> list[Tensor]:
    """Sum rows of all ranks, one rank after the other, and return this rank's; one message."""
    parts = [pack(*pair) for pair in zip(*(x.split(members.rows) for x in tensors))]
    total = reduce_scatter_uneven(parts, resolve_group(members.group))
    return unpack(total, tensors, members.rows[members.rank])
