"""Attention by several kernel calls: forward merges their results, backward adds their gradients.

S rows of queries, B batch, N heads, V head size of values. Everything is accumulated in float32 at
lowest, in the order of the calls, which is the same in every run. The first result of a row is
taken over as it is; rows that follow each other are a view, others are gathered once and updated in
place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mindspeed.ops.fusion_attention.flash4 import Documents
from mindspeed.ops.merge_attention import add_rows, merge_attention
from mindspeed.ops.partial_attention import partial_attention, partial_attention_backward
from mindspeed.parallel.context.blocks import Call
from mindspeed.parallel.context.layout import Range, index_of, joined
from mindspeed.parallel.context.rule import Rule, keys_of


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a tensor: one range, or an index."""

    ranges: tuple[Range, ...]
    index: Tensor | None = None

    @classmethod
    def of(cls, ranges: Sequence[Range], device: torch.device) -> Rows:
        """Describe ranges in the order in which they are taken."""
        found = tuple(joined(ranges))
        return cls(found, None if len(found) == 1 else index_of(found, device))

    @classmethod
    def in_order(cls, ranges: Sequence[Range], order: Tensor) -> Rows:
        """Describe ranges of a sequence; `order` says where each of its rows is."""
        found = tuple(joined(ranges))
        return cls(found, order.index_select(0, index_of(found, order.device)))

    def is_all(self, num_rows: int) -> bool:
        """Whether they are all rows of a tensor of so many, in its order."""
        return self.index is None and self.ranges == ((0, num_rows),)

    def view(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the range as a view; with an index, all rows, to which it applies."""
        if self.index is not None or self.is_all(x.shape[dim]):
            return x
        ((start, end),) = self.ranges
        return x.narrow(dim, start, end - start)

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the rows; a copy with an index."""
        return self.view(x, dim) if self.index is None else x.index_select(dim, self.index)

    def put(self, x: Tensor, values: Tensor, dim: int = 0) -> None:
        """Write the rows."""
        if self.index is None:
            self.view(x, dim).copy_(values)
        else:
            x.index_copy_(dim, self.index, values.to(x.dtype))


class Seen:
    """Rows that have a result: others are written where they belong, not merged or added."""

    def __init__(self) -> None:
        self._ranges: tuple[Range, ...] = ()

    def add(self, rows: Rows) -> bool:
        """Add rows, and return whether all of them are new."""
        ranges, is_new = sorted((*self._ranges, *rows.ranges)), True
        union: list[Range] = []
        for start, end in ranges:
            if union and start <= union[-1][1]:
                is_new = is_new and start == union[-1][1]
                union[-1] = union[-1][0], max(end, union[-1][1])
            else:
                union.append((start, end))
        self._ranges = tuple(union)
        return is_new


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the rows of a call are in the tensors of a rank, and the lengths of its documents."""

    q: Rows
    k: Rows
    documents: Documents | None

    @staticmethod
    @functools.lru_cache(maxsize=128)
    def of(call: Call, device: torch.device, order: Tensor | None) -> Placement:
        """Return what a call needs on a device: every layer makes the same calls."""
        of_keys = Rows.of(call.k, device) if order is None else Rows.in_order(call.k, order)
        rows = Rows.of(call.q, device), of_keys
        if len(call.blocks) == 1:
            return Placement(*rows, None)
        lengths = [[end - start for start, end in ranges] for ranges in (call.q, call.k)]
        of_q, of_k = (
            torch.tensor([0, *accumulate(n)], dtype=torch.int32).to(device, non_blocking=True)
            for n in lengths
        )
        return Placement(*rows, Documents(of_q, of_k, max(lengths[0]), max(lengths[1])))


class Taken:
    """Rows of some tensors (S, ...) or (..., S), kept while calls ask for the same ones."""

    def __init__(self, *tensors: Tensor, dims: Sequence[int]) -> None:
        self._tensors, self._dims = tensors, dims
        self._ranges: tuple[Range, ...] | None = None
        self._taken: list[Tensor] = []

    def rows(self, call: Call, where: Rows) -> list[Tensor]:
        """Return the rows of a call's queries; one after the other often have the same."""
        if call.q != self._ranges:
            self._taken = [where.take(x, dim) for x, dim in zip(self._tensors, self._dims)]
            self._ranges = call.q
        return self._taken


class Attention:
    """The output and log-sum-exp of queries (S, B, N, H) over the keys seen so far."""

    def __init__(self, rule: Rule, q: Tensor, value_size: int) -> None:
        self._rule, self._dtype, self._device = rule, q.dtype, q.device
        self._shape = *q.shape[:-1], value_size
        self._queries, self._seen = Taken(q, dims=[0]), Seen()
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, call: Call, kv: Sequence[Tensor], order: Tensor | None = None) -> None:
        """Attend to more keys and values; `order` says where the rows of a call are in them."""
        where = Placement.of(call, self._device, order)
        (q,) = self._queries.rows(call, where.q)
        k, v = (where.k.take(x) for x in kv)
        options = {"scale": self._rule.scale, "window": call.window}
        if where.documents is not None:
            packed = (x.squeeze(1) for x in (q, k, v))
            out, lse = partial_attention(*packed, documents=where.documents, **options)
            self._merge(where.q, out.unsqueeze(1), lse.unsqueeze(0))
        else:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            bias = self._rule.bias_of(call.blocks[0], self._device)
            out, lse = partial_attention(q, k, v, bias=bias, **options)
            self._merge(where.q, out.transpose(0, 1), lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (S, B, N, V) in the dtype of the queries and the log-sum-exp (B, N, S).

        A row without keys has zeros, and a log-sum-exp of -inf.
        """
        if self._out is None or self._lse is None:
            self._out, self._lse = self._nothing()
        return self._out.to(self._dtype).contiguous(), self._lse.contiguous()

    def _merge(self, rows: Rows, out: Tensor, lse: Tensor) -> None:
        is_new = self._seen.add(rows)
        if self._out is None and rows.is_all(self._shape[0]):
            self._out, self._lse = out, lse
            return
        if self._out is None or self._lse is None:
            self._out, self._lse = self._nothing()
        if is_new:
            rows.put(self._out, out)
            rows.put(self._lse, lse, -1)
            return
        before, dtype = None, wide(self._dtype)
        if self._out.dtype != dtype and rows.is_all(self._shape[0]):
            before = self._out
            self._out = torch.empty(self._shape, dtype=dtype, device=self._device)
        self._out = self._out.to(dtype)
        total, total_lse = rows.view(self._out), rows.view(self._lse, -1)
        merge_attention(total, total_lse, out, lse, rows.index, before=before)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        rows, batch, heads, _ = self._shape
        dtype, where = wide(self._dtype), self._device
        lse = torch.full((batch, heads, rows), float("-inf"), dtype=dtype, device=where)
        return torch.zeros(self._shape, dtype=self._dtype, device=where), lse


class RowSums:
    """Sums over calls of the gradients of some tensors, in one flat buffer: one message.

    `arrived` gives the buffer to add to, None if there is none; it is called when the first
    gradients have been computed.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        num_rows: int,
        arrived: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        self._like, self._num_rows, self._arrived = like, num_rows, arrived
        self._seen = Seen()
        self._first: Sequence[Tensor] | None = None
        self._buffer: Tensor | None = None

    def add(self, rows: Rows, grads: Sequence[Tensor]) -> None:
        """Add the gradients of some rows."""
        is_new = self._seen.add(rows)
        if self._first is None and self._buffer is None:
            self._buffer = self._arrived()
            if self._buffer is None and rows.is_all(self._num_rows):
                self._first = grads
                return
            if self._buffer is None:
                self._first = [x.new_zeros(self._num_rows, *x.shape[1:]) for x in self._like]
        if self._first is not None and is_new:
            for first, grad in zip(self._first, grads):
                rows.put(first, grad)
            return
        befores: Sequence[Tensor | None] = [None] * len(grads)
        if self._first is not None and rows.is_all(self._num_rows):
            befores, self._first = self._first, None
            self._buffer = self._make(torch.empty)
        for total, grad, before in zip(self.totals(), grads, befores):
            add_rows(rows.view(total), grad, rows.index, before=before)

    @property
    def buffer(self) -> Tensor:
        """The sums of all tensors, in float32 at lowest."""
        if self._buffer is None and self._first is None:
            self._buffer = self._arrived()
        if self._buffer is None:
            self._buffer = self._make(torch.zeros if self._first is None else torch.empty)
            for total, grad in zip(self.totals(), self._first or ()):
                total.copy_(grad)
            self._first = None
        return self._buffer

    def _make(self, make: Callable[..., Tensor]) -> Tensor:
        size, x = packed_size(self._like, self._num_rows), self._like[0]
        return make(size, dtype=wide(x.dtype), device=x.device)

    def totals(self) -> list[Tensor]:
        """Return the sums of each tensor, as views of the buffer."""
        return unpack(self.buffer, self._like, self._num_rows)

    def result(self) -> list[Tensor]:
        """Return the sums in the dtypes of the tensors."""
        totals = self.totals() if self._first is None else self._first
        return [total.to(x.dtype) for total, x in zip(totals, self._like)]


class Gradients:
    """The gradients of a rank's queries and bias, summed over calls."""

    def __init__(self, rule: Rule, q: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> None:
        """Take the gradient and the output (S, B, N, V), and the log-sum-exp, over all keys."""
        self._rule, self._device = rule, q.device
        self._queries = Taken(grad.contiguous(), q, out, lse, dims=[0, 0, 0, -1])
        self._dq = RowSums([q], len(q))
        self._dbias = None if rule.bias is None else torch.zeros_like(rule.bias)

    def add(
        self, call: Call, kv: Sequence[Tensor], sums: RowSums, order: Tensor | None = None
    ) -> None:
        """Compute the gradients of one call; those of keys and values are added to `sums`."""
        where = Placement.of(call, self._device, order)
        grad, q, out, lse = self._queries.rows(call, where.q)
        k, v = (where.k.take(x) for x in kv)
        options = {"scale": self._rule.scale, "window": call.window}
        if where.documents is not None:
            tensors = (x.squeeze(1) for x in (grad, q, k, v, out))
            *grads, _ = partial_attention_backward(
                *tensors, lse.squeeze(0), documents=where.documents, **options
            )
            dq, dk, dv = (x.unsqueeze(1) for x in grads)
        else:
            tensors = (x.transpose(0, 1) for x in (grad, q, k, v, out))
            bias = self._rule.bias_of(call.blocks[0], self._device)
            *grads, dbias = partial_attention_backward(*tensors, lse, bias=bias, **options)
            dq, dk, dv = (x.transpose(0, 1) for x in grads)
            self._add_bias(call, dbias)
        self._dq.add(where.q, [dq])
        sums.add(where.k, [dk, dv])

    def result(self) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the queries and of the bias."""
        return self._dq.result()[0], self._dbias

    def _add_bias(self, call: Call, dbias: Tensor | None) -> None:
        if self._dbias is None or dbias is None:
            return
        for dim in (0, 1):  # where the bias is shared
            if self._dbias.shape[dim] == 1:
                dbias = dbias.sum(dim, keepdim=True)
        block = call.blocks[0]
        self._dbias[..., slice(*block.q), keys_of(block)] += dbias


def pack(*tensors: Tensor) -> Tensor:
    """Return tensors as one flat tensor: one message."""
    return torch.cat([x.flatten() for x in tensors])


def unpack(buffer: Tensor, like: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return `rows` rows of tensors shaped like others, of a flat tensor."""
    parts = buffer.split([rows * x.shape[1:].numel() for x in like])
    return [part.view(rows, *x.shape[1:]) for part, x in zip(parts, like)]


def packed_size(like: Sequence[Tensor], rows: int) -> int:
    """Return the length of such a flat tensor."""
    return rows * sum(x.shape[1:].numel() for x in like)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of another are summed."""
    return torch.promote_types(dtype, torch.float32)
