"""Ranks that one process plays in turn, in a ring or gathering: all blocks are at hand."""

from dataclasses import dataclass

import torch

from mindspeed.parallel.context.exchange import (
    Arrived,
    Exchange,
    ReturningGradients,
    attention_over,
)
from mindspeed.parallel.context.layout import Layout, sequence_order
from mindspeed.parallel.context.merge import RowSums, unpack
from mindspeed.parallel.context.ring import Schedule


class PlayedRing:
    """The keys and values of all ranks, and the gradients that the ranks have added up so far."""

    def __init__(self, layout: Layout, blocks):
        self.layout, self.blocks = layout, blocks
        self.totals = [None] * layout.size

    def attend(self, q, rank, rule):
        """Return the attention of one rank's queries to the keys of all ranks."""
        k, v = (x.detach().requires_grad_() for x in self.blocks[rank])
        return attention_over(q, k, v, self.play(rank), rule)

    def play(self, rank):
        """Return the exchange of one rank."""
        return _RingRank(None, self.layout, self, rank)

    def gradients(self, rank):
        """Return the gradients of a rank's keys and values, after backward of all ranks."""
        return unpack(self.totals[rank], self.blocks[rank], self.layout.num_rows(rank))


@dataclass(frozen=True)
class _PlayedRank(Exchange):
    ring: PlayedRing
    number: int

    @property
    def rank(self):
        return self.number


class _RingRank(_PlayedRank):
    def source(self, step):
        return Schedule(self.layout.size).source(self.number, step)

    def arriving(self, k, v):
        for source in map(self.source, range(self.layout.size)):
            yield Arrived(self.layout.ranges[source], self.ring.blocks[source])

    def returning(self, k, v):
        return _RingTotals(self)


class _RingTotals(ReturningGradients):
    def __init__(self, rank):
        self._rank, self._ring = rank, rank.ring

    def sums(self, step):
        source = self._rank.source(step)
        rows = self._ring.layout.num_rows(source)
        return RowSums(self._ring.blocks[source], rows, lambda: self._ring.totals[source])

    def send(self, step, sums):
        self._ring.totals[self._rank.source(step)] = sums.buffer

    def result(self):
        number = self._rank.number
        rows = self._ring.layout.num_rows(number)
        return RowSums(self._ring.blocks[number], rows, lambda: self._ring.totals[number]).result()


class _GatheringRank(_PlayedRank):
    def arriving(self, k, v):
        """Yield what an all-gather brings, joined as after a real one."""
        gathered = [torch.cat(block) for block in zip(*self.ring.blocks)]
        yield Arrived(self.layout.covered, gathered, sequence_order(self.layout, k.device))

    def returning(self, k, v):
        return _GatheredTotals(self)


class _GatheredTotals(ReturningGradients):
    """Gradients of all keys, summed over the ranks by what a reduce-scatter would."""

    def __init__(self, rank):
        self._rank, self._kv = rank, rank.ring.blocks[0]

    def sums(self, step):
        return RowSums(self._kv, sum(self._rank.rows))

    def send(self, step, sums):
        self._grads = sums.totals()

    def result(self):
        rows, number = self._rank.rows, self._rank.number
        return [x.split(rows)[number].to(k.dtype) for x, k in zip(self._grads, self._kv)]


class PlayedGather(PlayedRing):
    """The same by ranks that gather all keys; sums over ranks are left to the network."""

    def play(self, rank):
        """Return the exchange of one rank."""
        return _GatheringRank(None, self.layout, self, rank)
