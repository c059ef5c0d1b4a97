"""A ring of ranks that one process plays in turn: all blocks are at hand, nothing travels."""

from dataclasses import dataclass

from mindspeed.parallel.context.exchange import Exchange, ReturningGradients, attention_over
from mindspeed.parallel.context.layout import Layout
from mindspeed.parallel.context.merge import RowSums, unpack
from mindspeed.parallel.context.ring import Schedule


class PlayedRing:
    """The keys and values of all ranks, and the gradients that the ranks have added up so far."""

    def __init__(self, layout: Layout, blocks):
        self.layout, self.blocks = layout, blocks
        self.totals = [None] * layout.size

    def attend(self, q, rank, rule):
        """Return the attention of one rank's queries to the keys of all ranks."""
        exchange = _PlayedRank(None, self.layout, self, rank)
        k, v = (x.detach().requires_grad_() for x in self.blocks[rank])
        return attention_over(q, k, v, exchange, rule)

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

    def source(self, step):
        return Schedule(self.layout.size).source(self.number, step)

    def arriving(self, k, v):
        for source in map(self.source, range(self.layout.size)):
            yield self.layout.ranges[source], self.ring.blocks[source]

    def returning(self, k, v):
        return _Totals(self)


class _Totals(ReturningGradients):
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
