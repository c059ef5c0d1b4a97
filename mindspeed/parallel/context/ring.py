"""Ring attention: keys and values travel round the ranks, queries stay.

In step t a rank attends to the keys of rank source(rank, t), while it already receives those of a
later step. With windows of w ranks (double ring) keys go round each window, and meanwhile on to the
next window: a slow link between windows is used once in w steps. One ring is the case of windows of
one rank.

Only rows of documents that several ranks hold travel: no other rank sees the rest.

Backward moves keys and values the same way. Their gradients follow: a rank that attends to a
block adds its share and passes the sum on to the next one that does, at last to the block's owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed.distributed.collectives import Pending, exchange, group_size
from mindspeed.parallel.context.blocks import Held, Spans, shared_and_whole
from mindspeed.parallel.context.exchange import Arrived, Exchange, ReturningGradients
from mindspeed.parallel.context.merge import Rows, RowSums, pack, packed_size, unpack


@dataclass(frozen=True)
class Schedule:
    """Which rank attends to which keys in which step."""

    size: int
    window: int = 1

    def source(self, rank: int, step: int) -> int:
        """Return whose keys a rank attends to; step 0 and step `size` are its own."""
        return self._moved(rank, -1, step)

    def holder(self, source: int, step: int) -> int:
        """Return which rank attends to the keys of `source`."""
        return self._moved(source, 1, step)

    def fed_from(self, step: int) -> list[int]:
        """Return the later steps whose keys are passed on during this one."""
        later = [step + 1] if (step + 1) % self.window else []
        later += [step + self.window] if step % self.window == 0 else []
        return [one for one in later if one < self.size]

    def _moved(self, rank: int, sign: int, step: int) -> int:
        window, slot = divmod(rank, self.window)
        outer, inner = divmod(step, self.window)
        windows = self.size // self.window
        return (window + sign * outer) % windows * self.window + (slot + sign * inner) % self.window


@dataclass(frozen=True)
class Ring(Exchange):
    """Ranks round which keys and values travel, in windows of some of them."""

    spans: Spans
    window: int = 1

    @property
    def schedule(self) -> Schedule:
        """The order in which the ranks attend to each other's keys."""
        return Schedule(group_size(self.group), self.window)

    @property
    def shared(self) -> Held:
        """The rows that travel."""
        return shared_and_whole(self.spans, self.layout)[0]

    def sent_rows(self, device: torch.device) -> Rows:
        """Return the rows of this rank that travel."""
        return Rows.of(self.shared.local[self.rank], device)

    def arriving(self, k: Tensor, v: Tensor) -> Iterator[Arrived]:
        """Yield the keys and values of each rank; the next ones travel until the next call."""
        schedule, rank = self.schedule, self.rank
        own = Arrived(self.layout.ranges[rank], [k, v])
        if schedule.size == 1:
            yield own
            return
        shared, sent = self.shared.layout, self.sent_rows(k.device)
        arriving: dict[int, tuple[Tensor, Pending]] = {}
        buffer = pack(sent.take(k), sent.take(v))
        for step in range(schedule.size):
            if step:
                buffer, pending = arriving.pop(step)
                pending.wait()
            source = schedule.source(rank, step)
            if later := schedule.fed_from(step):
                sends = [(buffer, schedule.holder(source, one)) for one in later]
                receives = []
                for one in later:
                    comes = schedule.source(rank, one)
                    empty = buffer.new_empty(packed_size((k, v), shared.num_rows(comes)))
                    receives.append((empty, schedule.holder(comes, step)))
                pending = exchange(sends, receives, self.group)  # type: ignore[arg-type]
                arriving |= {one: (empty, pending) for one, (empty, _) in zip(later, receives)}
            if step == 0:
                yield own
            else:
                kv = unpack(buffer, (k, v), shared.num_rows(source))
                yield Arrived(shared.ranges[source], kv)

    def returning(self, k: Tensor, v: Tensor) -> ReturningGradients:
        """Return gradients that follow the keys and values, one step later."""
        return _FollowingGradients(self, k, v)


class _FollowingGradients(ReturningGradients):
    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self._ring, self._kv, self._schedule = ring, (k, v), ring.schedule
        self._shared, self._sent = ring.shared.layout, ring.sent_rows(k.device)
        self._pending: Pending | None = None
        self._received: Tensor | None = None
        self._own: RowSums

    def sums(self, step: int) -> RowSums:
        """Return sums that start from what the ranks before this one have added."""
        if step == 0:
            self._own = RowSums(self._kv, len(self._kv[0]))
            return self._own
        rows = self._shared.num_rows(self._schedule.source(self._ring.rank, step))
        return RowSums(self._kv, rows, self._arrived)

    def send(self, step: int, sums: RowSums) -> None:
        """Pass the sums on to the next rank that attends to the same keys."""
        ring, schedule = self._ring, self._schedule
        if schedule.size == 1:
            return
        source, comes = (schedule.source(ring.rank, one) for one in (step, step + 1))
        total = sums.buffer  # waits for what it starts from: before the next is received
        if step == 0 and not self._sends_all:
            total = pack(*(self._sent.take(x) for x in sums.totals()))
        self._received = total.new_empty(packed_size(self._kv, self._shared.num_rows(comes)))
        self._pending = exchange(
            [(total, schedule.holder(source, step + 1))],
            [(self._received, schedule.holder(comes, step))],
            ring.group,  # type: ignore[arg-type]
        )

    def result(self) -> list[Tensor]:
        """Return the sums of this rank's own keys: what came back, and what never left."""
        if self._schedule.size == 1:
            return self._own.result()
        rows = self._shared.num_rows(self._ring.rank)
        back = RowSums(self._kv, rows, self._arrived)
        if self._sends_all:
            return back.result()
        for total, x in zip(self._own.totals(), back.totals()):
            self._sent.put(total, x)
        return self._own.result()

    @property
    def _sends_all(self) -> bool:
        return self._sent.is_all(len(self._kv[0]))

    def _arrived(self) -> Tensor | None:
        if self._pending is not None:
            self._pending.wait()
        return self._received
