"""Attention to keys and values that every rank gathers from all ranks, forward and backward.

Memory grows with the whole sequence, messages are fewer and larger than those of a ring. Gradients
of keys and values are summed by a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mindspeed.distributed.collectives import (
    all_gather_uneven,
    reduce_scatter_uneven,
    resolve_group,
)
from mindspeed.parallel.context.exchange import Exchange, Members, ReturningGradients
from mindspeed.parallel.context.layout import Range, sequence_order
from mindspeed.parallel.context.merge import RowSums, pack, packed_size, unpack


class Gather(Exchange):
    """Ranks that gather all keys and values, in one step."""

    def order(self, device: torch.device) -> Tensor | None:
        """Return where each row of the sequence is: calls take what they need of it."""
        return sequence_order(self.layout, device)

    def arriving(self, k: Tensor, v: Tensor) -> Iterator[tuple[tuple[Range, ...], list[Tensor]]]:
        """Yield the keys and values of all ranks, one rank after the other."""
        yield self.layout.covered, gather_rows([k, v], self)

    def returning(self, k: Tensor, v: Tensor) -> ReturningGradients:
        """Return gradients that are summed by a reduce-scatter."""
        return _ScatteredGradients(self, k, v)


class _ScatteredGradients(ReturningGradients):
    def __init__(self, members: Members, k: Tensor, v: Tensor) -> None:
        self._members, self._kv = members, (k, v)
        self._sums: RowSums

    def sums(self, step: int) -> RowSums:
        """Return sums for the rows of all ranks."""
        return RowSums(self._kv, sum(self._members.rows))

    def send(self, step: int, sums: RowSums) -> None:
        """Keep the sums of the only step."""
        self._sums = sums

    def result(self) -> list[Tensor]:
        """Sum over the ranks, and return the gradients of this rank's rows."""
        members, grads = self._members, self._sums.totals()
        parts = [pack(*pair) for pair in zip(*(x.split(members.rows) for x in grads))]
        total = reduce_scatter_uneven(parts, resolve_group(members.group))
        mine = unpack(total, grads, members.rows[members.rank])
        return [grad.to(x.dtype) for grad, x in zip(mine, self._kv)]


def gather_rows(tensors: Sequence[Tensor], members: Members) -> list[Tensor]:
    """Return the rows of all ranks, one rank after the other; one message for all tensors."""
    sizes = [packed_size(tensors, n) for n in members.rows]
    flat = all_gather_uneven(pack(*tensors), sizes, resolve_group(members.group))
    parts = zip(*(unpack(x, tensors, n) for x, n in zip(flat, members.rows)))
    return [torch.cat(part) for part in parts]
