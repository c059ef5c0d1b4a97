"""Attention to keys and values that other ranks hold: the frame of ring and all-gather.

An `Exchange` brings blocks of keys and values to a rank and takes their gradients back; what is
computed with a block is the same for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.distributed.collectives import group_rank
from mindspeed.ops.fusion_attention.kept import compute_once
from mindspeed.parallel.context.layout import Layout, Range
from mindspeed.parallel.context.merge import Attention, Gradients, RowSums
from mindspeed.parallel.context.rule import Rule


@dataclass(frozen=True)
class Members:
    """A group of ranks, and the rows of each; no group is a group of one rank."""

    group: ProcessGroup | None
    layout: Layout

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return group_rank(self.group)

    @property
    def rows(self) -> list[int]:
        """The number of rows of each rank."""
        return [self.layout.num_rows(rank) for rank in range(self.layout.size)]


class Arrived(NamedTuple):
    """Keys and values that this rank has got from others, or has itself."""

    ranges: tuple[Range, ...]
    """Their rows in the sequence."""
    kv: list[Tensor]
    order: Tensor | None = None
    """Where those rows are in the tensors; None if in their order."""


class ReturningGradients(ABC):
    """Gradients of keys and values on their way to the ranks that own them."""

    @abstractmethod
    def sums(self, step: int) -> RowSums:
        """Return what the gradients of a step's keys and values are added to."""

    @abstractmethod
    def send(self, step: int, sums: RowSums) -> None:
        """Pass the sums of a step on."""

    @abstractmethod
    def result(self) -> list[Tensor]:
        """Return the gradients of this rank's own keys and values."""


@dataclass(frozen=True)
class Exchange(Members, ABC):
    """Brings keys and values to this rank, in steps."""

    @abstractmethod
    def arriving(self, k: Tensor, v: Tensor) -> Iterator[Arrived]:
        """Yield the keys and values of each step."""

    @abstractmethod
    def returning(self, k: Tensor, v: Tensor) -> ReturningGradients:
        """Return where gradients go, in backward."""


def attention_over(q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, rule: Rule) -> Tensor:
    """Return the attention (S, B, N, V) of this rank's queries to the keys of all ranks."""
    job = exchange, replace(rule, bias=None, slopes=None)
    return _ExchangedAttention.apply(q, k, v, rule.bias, rule.slopes, job)


class _ExchangedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        slopes: Tensor | None,
        job: tuple[Exchange, Rule],
    ) -> Tensor:
        exchange, rule = ctx.job = job
        rule = replace(rule, bias=bias, slopes=slopes)
        out, lse = compute_once(lambda: _attend(q, k, v, exchange, rule))
        ctx.save_for_backward(q, k, v, bias, slopes, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, slopes, out, lse = ctx.saved_tensors
        exchange, rule = ctx.job
        rule = replace(rule, bias=bias, slopes=slopes)
        grads = Gradients(rule, q, grad, out, lse)
        mine = exchange.layout.ranges[exchange.rank]
        returning = exchange.returning(k, v)
        for step, (ranges, kv, order) in enumerate(exchange.arriving(k, v)):
            sums = returning.sums(step)
            for call in rule.calls(mine, ranges, q):
                grads.add(call, kv, sums, order)
            returning.send(step, sums)
        dq, dbias = grads.result()
        dk, dv = returning.result()
        return dq, dk, dv, dbias, None, None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, rule: Rule
) -> tuple[Tensor, Tensor]:
    attention = Attention(rule, q, v.shape[-1])
    mine = exchange.layout.ranges[exchange.rank]
    for ranges, kv, order in exchange.arriving(k, v):
        for call in rule.calls(mine, ranges, q):
            attention.add(call, kv, order)
    return attention.result()
