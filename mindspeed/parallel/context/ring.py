"""Ring attention: keys and values travel round the ranks, queries stay.

In step t a rank attends to the keys of rank source(rank, t), while it already receives those of a
later step. With windows of w ranks (double ring) keys go round each window, and meanwhile on to the
next window: a slow link between windows is used once in w steps. One ring is the case of windows of
one rank.

Backward moves keys and values the same way. Their gradients follow: a rank that attends to a
block adds its share and passes the sum on to the next one that does, at last to the block's owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mindspeed.distributed.collectives import Pending, exchange, group_size
from mindspeed.parallel.context.exchange import Exchange, ReturningGradients
from mindspeed.parallel.context.layout import Range
from mindspeed.parallel.context.merge import RowSums, pack, packed_size, unpack


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

    window: int = 1

    @property
    def schedule(self) -> Schedule:
        """The order in which the ranks attend to each other's keys."""
        return Schedule(group_size(self.group), self.window)

    def arriving(self, k: Tensor, v: Tensor) -> Iterator[tuple[tuple[Range, ...], list[Tensor]]]:
        """Yield the keys and values of each rank; the next ones travel until the next call."""
        schedule, rank = self.schedule, self.rank
        arriving: dict[int, tuple[Tensor, Pending]] = {}
        buffer = pack(k, v) if schedule.size > 1 else k
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
                    empty = buffer.new_empty(packed_size((k, v), self.layout.num_rows(comes)))
                    receives.append((empty, schedule.holder(comes, step)))
                pending = exchange(sends, receives, self.group)  # type: ignore[arg-type]
                arriving |= {one: (empty, pending) for one, (empty, _) in zip(later, receives)}
            kv = unpack(buffer, (k, v), self.layout.num_rows(source)) if step else [k, v]
            yield self.layout.ranges[source], kv

    def returning(self, k: Tensor, v: Tensor) -> ReturningGradients:
        """Return gradients that follow the keys and values, one step later."""
        return _FollowingGradients(self, k, v)


class _FollowingGradients(ReturningGradients):
    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self._ring, self._kv, self._schedule = ring, (k, v), ring.schedule
        self._pending: Pending | None = None
        self._received: Tensor | None = None
        self._last: RowSums | None = None

    def sums(self, step: int) -> RowSums:
        """Return sums that start from what the ranks before this one have added."""
        rows = self._ring.layout.num_rows(self._schedule.source(self._ring.rank, step))
        return RowSums(self._kv, rows, self._arrived)

    def send(self, step: int, sums: RowSums) -> None:
        """Pass the sums on to the next rank that attends to the same keys."""
        ring, schedule = self._ring, self._schedule
        if schedule.size == 1:
            self._last = sums
            return
        source, comes = (schedule.source(ring.rank, one) for one in (step, step + 1))
        total = sums.buffer  # waits for what it starts from: before the next is received
        self._received = total.new_empty(packed_size(self._kv, ring.layout.num_rows(comes)))
        self._pending = exchange(
            [(total, schedule.holder(source, step + 1))],
            [(self._received, schedule.holder(comes, step))],
            ring.group,  # type: ignore[arg-type]
        )

    def result(self) -> list[Tensor]:
        """Return the sums that have come back to the owner of the keys."""
        last = self._last or RowSums(self._kv, len(self._kv[0]), self._arrived)
        return last.result()

    def _arrived(self) -> Tensor | None:
        if self._pending is not None:
            self._pending.wait()
        return self._received
