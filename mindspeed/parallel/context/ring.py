"""Ring attention: keys and values travel round the ranks, queries stay.

In step t a rank attends to the keys of rank source(rank, t), while it already receives those of a
later step. With windows of w ranks (double ring) keys go round each window, and meanwhile on to the
next window: a slow link between windows is used once in w steps. One ring is the case of windows of
one rank.

Backward moves keys and values the same way. Their gradients follow: a rank that attends to a
block adds its share and passes the sum on to the next one that does, at last to the block's owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mindspeed.distributed.collectives import Pending, exchange, group_size
from mindspeed.parallel.context.merge import (
    Gradients,
    Inputs,
    Members,
    MergedOutput,
    Rule,
    attend,
    pack,
    packed_size,
    unpack,
    zeros_like,
)


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
class Ring(Members):
    """Ranks round which keys and values travel, in windows of some of them."""

    window: int = 1

    @property
    def schedule(self) -> Schedule:
        """The order in which the ranks attend to each other's keys."""
        return Schedule(group_size(self.group), self.window)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Ring,
    rule: Rule,
    *,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Return the attention (S, B, N, V) of this rank's queries to the keys of all ranks."""
    return _RingAttention.apply(q, k, v, bias, slopes, (ring, rule))


class _RingAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        slopes: Tensor | None,
        job: tuple[Ring, Rule],
    ) -> Tensor:
        ring, rule = ctx.job = job
        inputs, merged = Inputs(q, bias, slopes), MergedOutput(q, v.shape[-1])
        ranges = ring.layout.ranges
        for source, (key, value) in _travelling(k, v, ring):
            for call in rule.calls(ranges[ring.rank], ranges[source], inputs):
                merged.add(call.q, *attend(rule, inputs, key, value, call))
        out, lse = merged.result()
        ctx.save_for_backward(q, k, v, bias, slopes, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, slopes, out, lse = ctx.saved_tensors
        ring, rule = ctx.job
        ranges, following = ring.layout.ranges, _FollowingGradients(ring, k, v)
        grads = Gradients(Inputs(q, bias, slopes), grad, out, lse)
        for step, (source, kv) in enumerate(_travelling(k, v, ring)):
            dkv = [zeros_like(x) for x in kv]
            for call in rule.calls(ranges[ring.rank], ranges[source], grads.inputs):
                grads.add(rule, kv, dkv, call)
            following.add(step, dkv)
        dk, dv = following.result()
        tensors = (grads.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), grads.dbias)
        return *tensors, None, None


def _travelling(k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield whose keys and values arrive, and them; the next ones travel until the next call."""
    schedule, rank = ring.schedule, ring.rank
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
                empty = buffer.new_empty(packed_size((k, v), ring.layout.num_rows(comes)))
                receives.append((empty, schedule.holder(comes, step)))
            pending = exchange(sends, receives, ring.group)  # type: ignore[arg-type]
            arriving |= {one: (empty, pending) for one, (empty, _) in zip(later, receives)}
        kv = unpack(buffer, (k, v), ring.layout.num_rows(source)) if step else [k, v]
        yield source, kv


class _FollowingGradients:
    """Sums of the gradients of keys and values that travel behind them, one step later."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self._ring, self._kv = ring, (k, v)
        self._pending: Pending | None = None
        self._received: Tensor | None = None

    def add(self, step: int, dkv: Sequence[Tensor]) -> None:
        """Add this rank's share of a step to what came from before, and pass the sum on."""
        total, ring = pack(*dkv), self._ring
        schedule, rank = ring.schedule, ring.rank
        if self._received is not None:
            total = self._wait() + total
        if schedule.size == 1:
            self._received = total
            return
        source, comes = schedule.source(rank, step), schedule.source(rank, step + 1)
        rows = ring.layout.num_rows(comes)
        self._received = total.new_empty(packed_size(self._kv, rows))
        self._pending = exchange(
            [(total, schedule.holder(source, step + 1))],
            [(self._received, schedule.holder(comes, step))],
            ring.group,  # type: ignore[arg-type]
        )

    def result(self) -> list[Tensor]:
        """Return the sums for this rank's own keys and values."""
        return unpack(self._wait(), self._kv, len(self._kv[0]))

    def _wait(self) -> Tensor:
        if self._pending is not None:
            self._pending.wait()
        assert self._received is not None
        return self._received
