"""Ulysses: an all-to-all gives a rank whole sequences for a part of the heads, another goes back.

Ranks may hold different numbers of rows, and heads need not divide by the ranks: the first ranks
get one more. A key head goes to every rank that has a query head of its group; the gradients that
come back are summed. Queries, keys and values of a layer are one message to each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.distributed.collectives import all_to_all_uneven, resolve_group
from mindspeed.parallel.context.exchange import Members
from mindspeed.parallel.context.layout import Range, sequence_order, split
from mindspeed.parallel.context.merge import wide


@dataclass(frozen=True)
class HeadSplit:
    """The query heads and the key / value heads of each rank."""

    q: tuple[Range, ...]
    k: tuple[Range, ...]
    group_size: int
    """Query heads of one key head."""

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, size: int) -> HeadSplit:
        """Split the query heads evenly, and let the key heads follow them."""
        group = num_heads // num_kv_heads
        of_q = split((0, num_heads), size)
        of_k = [
            (start // group, -(-end // group)) if end > start else (0, 0) for start, end in of_q
        ]
        return cls(tuple(of_q), tuple(of_k), group)

    def per_query_group(self, x: Tensor, rank: int) -> Tensor:
        """Repeat a rank's key heads so that all serve equally many of its query heads.

        Ranks whose query heads begin and end with those of a key head need no copy.
        """
        serves = [head // self.group_size for head in range(*self.q[rank])]
        counts = [len(list(heads)) for _, heads in groupby(serves)]
        if len(set(counts)) <= 1:
            return x
        heads = (one.expand(-1, -1, n, -1) for one, n in zip(x.split(1, 2), counts))
        return torch.cat(list(heads), 2)


def to_heads(
    tensors: Sequence[Tensor], splits: Sequence[tuple[Range, ...]], members: Members
) -> tuple[Tensor, ...]:
    """Turn (rows of this rank, B, N, H) tensors into (rows of the group, B, heads of this rank, H).

    `splits` gives the heads of each rank, for each tensor. The rows of the group are those of
    its members, in the order of the sequence.
    """
    return _ToHeads.apply(members, tuple(splits), *tensors)


def to_rows(x: Tensor, heads: tuple[Range, ...], members: Members) -> Tensor:
    """Undo `to_heads` of one tensor whose heads are split without overlap."""
    return _ToRows.apply(x, members, heads)


class _ToHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, members: Members, splits: tuple[tuple[Range, ...], ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.members, ctx.splits, ctx.heads = members, splits, [x.shape[2] for x in tensors]
        return tuple(_to_heads(tensors, splits, members))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_to_rows(grads, ctx.splits, ctx.heads, ctx.members)


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, members: Members, heads: tuple[Range, ...]) -> Tensor:
        ctx.members, ctx.heads = members, heads
        return _to_rows([x], [heads], [heads[-1][1]], members)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_to_heads([grad], [ctx.heads], ctx.members), None, None


def _to_heads(
    tensors: Sequence[Tensor], splits: Sequence[tuple[Range, ...]], members: Members
) -> list[Tensor]:
    rank, rows = members.rank, members.rows
    parts = [
        [x[:, :, slice(*heads[to])] for x, heads in zip(tensors, splits)] for to in range(len(rows))
    ]
    shapes = [
        [(n, x.shape[1], _length(heads[rank]), x.shape[3]) for x, heads in zip(tensors, splits)]
        for n in rows
    ]
    received = _all_to_all(parts, shapes, members.group)
    order = sequence_order(members.layout, tensors[0].device)
    found = [torch.cat(pieces) for pieces in zip(*received)]
    return found if order is None else [x.index_select(0, order) for x in found]


def _to_rows(
    tensors: Sequence[Tensor],
    splits: Sequence[tuple[Range, ...]],
    num_heads: Sequence[int],
    members: Members,
) -> list[Tensor]:
    """Send rows to the ranks that hold them; what arrives for a head from several is summed."""
    rank, rows = members.rank, members.rows
    order = sequence_order(members.layout, tensors[0].device)
    if order is not None:
        back = torch.argsort(order)
        tensors = [x.index_select(0, back) for x in tensors]
    parts = list(zip(*(x.split(rows) for x in tensors)))
    shapes = [
        [
            (rows[rank], x.shape[1], _length(heads[of]), x.shape[3])
            for x, heads in zip(tensors, splits)
        ]
        for of in range(len(rows))
    ]
    received = _all_to_all(parts, shapes, members.group)
    return [
        _joined(pieces, heads, n) for pieces, heads, n in zip(zip(*received), splits, num_heads)
    ]


def _joined(pieces: Sequence[Tensor], heads: tuple[Range, ...], num_heads: int) -> Tensor:
    held = [one for one in heads if _length(one)]
    if all(one[1] == other[0] for one, other in zip(held, held[1:])):
        return torch.cat(list(pieces), 2)
    (rows, batch, _, size), dtype = pieces[0].shape, pieces[0].dtype
    total = pieces[0].new_zeros(rows, batch, num_heads, size, dtype=wide(dtype))
    for piece, where in zip(pieces, heads):
        total[:, :, slice(*where)] += piece
    return total.to(dtype)


def _all_to_all(
    parts: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    group: ProcessGroup | None,
) -> list[list[Tensor]]:
    """Send parts[i] to rank i; return the tensors of the given shapes that come from each rank."""
    flat = torch.cat([part.flatten() for to in parts for part in to])
    send_sizes = [sum(part.numel() for part in to) for to in parts]
    sizes = [[torch.Size(shape).numel() for shape in of] for of in shapes]
    received = all_to_all_uneven(flat, send_sizes, [sum(of) for of in sizes], resolve_group(group))
    return [
        [x.view(shape) for x, shape in zip(one.split(of), of_shapes)]
        for one, of, of_shapes in zip(received.split([sum(of) for of in sizes]), sizes, shapes)
    ]


def _length(heads: Range) -> int:
    return heads[1] - heads[0]
