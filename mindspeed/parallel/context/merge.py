"""Attention by several kernel calls: forward merges their results, backward adds their gradients.

S rows of queries, B batch, N heads, V head size of values. Everything is accumulated in float32 at
lowest, in the order of the calls, which is the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed.distributed.collectives import group_rank
from mindspeed.ops.fusion_attention.flash4 import Documents
from mindspeed.ops.partial_attention import (
    partial_attention,
    partial_attention_backward,
    reference,
)
from mindspeed.ops.ring_attention_update import ring_attention_update
from mindspeed.parallel.context.blocks import Call, Spans, Window, plan
from mindspeed.parallel.context.layout import Layout, Range, index_of

COPIES = 8  # of each statistic in ring_attention_update


@dataclass(frozen=True)
class Rule:
    """What is computed between queries and keys, whichever rank holds them."""

    spans: Spans
    window: Window
    scale: float

    def calls(
        self, q_ranges: tuple[Range, ...], k_ranges: tuple[Range, ...], inputs: Inputs
    ) -> Iterator[Call]:
        """Return the calls for some rows of queries and keys; a rank without heads has none."""
        if not inputs.q.shape[2]:
            return
        for call in plan(self.spans, q_ranges, k_ranges, self.window, not inputs.has_bias):
            if inputs.q.shape[1] == 1:
                yield call
            else:  # packed kernels take one sequence: documents of a batch go one by one
                yield from (Call((block,)) for block in call.blocks)


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


@dataclass(frozen=True)
class Inputs:
    """The queries of a rank, and what is added to their scores.

    `bias` is (1 or B, 1 or N, S, keys of the whole sequence), `slopes` (N,) are those of ALiBi.
    """

    q: Tensor
    bias: Tensor | None = None
    slopes: Tensor | None = None

    @property
    def has_bias(self) -> bool:
        """Whether scores depend on where queries and keys are."""
        return self.bias is not None or self.slopes is not None

    def bias_of(self, call: Call) -> Tensor | None:
        """Return the bias of a block, (1 or B, 1 or N, queries, keys)."""
        (block, *_), total = call.blocks, None
        if self.bias is not None:
            total = self.bias[..., slice(*block.q), _keys(call)]
        if self.slopes is not None:
            query = torch.arange(block.q[1] - block.q[0], device=self.q.device) + block.q_start
            key = torch.arange(block.k[1] - block.k[0], device=self.q.device) + block.k_start
            distance = (query.unsqueeze(1) - key).abs()
            alibi = -self.slopes.view(1, -1, 1, 1) * distance
            total = alibi if total is None else total + alibi
        return total


class MergedOutput:
    """The output and log-sum-exp of queries over the keys seen so far."""

    def __init__(self, q: Tensor, value_size: int) -> None:
        self._dtype = q.dtype
        self._shape = *q.shape[:-1], value_size
        self._first: tuple[Tensor, Tensor] | None = None
        self._parts: tuple[Tensor, Tensor, Tensor] | None = None
        self._device = q.device

    def add(self, rows: Sequence[Range], out: Tensor, lse: Tensor) -> None:
        """Merge (rows, B, N, V) outputs and (B, N, rows) log-sum-exps of more keys."""
        if self._parts is None and self._first is None and list(rows) == [(0, self._shape[0])]:
            self._first = out, lse
            return
        outs, largest, total = self._parts = self._accumulators()
        where = Rows(rows, self._device)
        previous = [where.take(x).flatten(0, 1) for x in (outs, largest, total)]
        current = (x.flatten(0, 1) for x in (out, *_statistics(lse)))
        merged = ring_attention_update(*previous, *current, layout="TND")
        for x, update in zip((outs, largest, total), merged):
            where.put(x, update.view(-1, *x.shape[1:]))

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (S, B, N, V) in the dtype of the queries and the log-sum-exp (B, N, S).

        A row without keys has zeros, and a log-sum-exp that no gradient depends on.
        """
        if self._first is not None and self._parts is None:
            return self._first[0].contiguous(), self._first[1]
        outs, largest, total = self._accumulators()
        lse = largest[..., 0] + total[..., 0].log()
        return outs.to(self._dtype), lse.permute(1, 2, 0).contiguous()

    def _accumulators(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._parts is not None:
            return self._parts
        dtype = torch.promote_types(self._dtype, torch.float32)
        if self._first is not None:
            out, lse = self._first
            largest, total = _statistics(lse)
            return out.to(dtype).contiguous(), largest.contiguous(), total.contiguous()
        shape = *self._shape[:-1], COPIES
        options = {"dtype": dtype, "device": self._device}
        # The lowest finite maximum: exp(-inf - -inf) would be NaN.
        least = torch.full(shape, torch.finfo(dtype).min, **options)  # type: ignore[call-overload]
        return torch.zeros(self._shape, **options), least, torch.zeros(shape, **options)  # type: ignore[call-overload]


def attend(rule: Rule, inputs: Inputs, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return (rows, B, N, V) and (B, N, rows) of one call."""
    q_rows, k_rows = Rows(call.q, k.device), Rows(call.k, k.device)
    q, k, v = q_rows.take(inputs.q), k_rows.take(k), k_rows.take(v)
    options = {"scale": rule.scale, "window": call.window}
    if len(call.blocks) > 1:
        documents = _documents(call, q.device)
        out, lse = partial_attention(
            *(x.squeeze(1) for x in (q, k, v)), documents=documents, **options
        )
        return out.unsqueeze(1), lse.unsqueeze(0)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out, lse = partial_attention(q, k, v, bias=inputs.bias_of(call), **options)
    return out.transpose(0, 1), lse


class Gradients:
    """The gradients of a rank's queries and bias, summed over calls."""

    def __init__(self, inputs: Inputs, grad: Tensor, out: Tensor, lse: Tensor) -> None:
        """Take the gradient and the output (S, B, N, V), and the log-sum-exp, over all keys."""
        self.inputs, self._out, self._lse = inputs, out, lse
        self._grad = grad.contiguous()
        self.dq = zeros_like(inputs.q)
        self.dbias = None if inputs.bias is None else torch.zeros_like(inputs.bias)

    def add(self, rule: Rule, kv: Sequence[Tensor], dkv: Sequence[Tensor], call: Call) -> None:
        """Compute the gradients of one call; those of keys and values are added to `dkv`."""
        q_rows, k_rows = Rows(call.q, self._grad.device), Rows(call.k, self._grad.device)
        lse = q_rows.take(self._lse, -1)
        grad, q, out = (q_rows.take(x) for x in (self._grad, self.inputs.q, self._out))
        k, v = (k_rows.take(x) for x in kv)
        options = {"scale": rule.scale, "window": call.window}
        if len(call.blocks) > 1:
            tensors = (x.squeeze(1) for x in (grad, q, k, v, out))
            grads = partial_attention_backward(
                *tensors, lse.squeeze(0), documents=_documents(call, q.device), **options
            )
            dq, dk, dv = (x.unsqueeze(1) for x in grads[:3])
        else:
            tensors = (x.transpose(0, 1) for x in (grad, q, k, v, out))
            *grads, dbias = partial_attention_backward(
                *tensors, lse, bias=self.inputs.bias_of(call), **options
            )
            dq, dk, dv = (x.transpose(0, 1) for x in grads)
            self._add_bias(call, dbias)
        q_rows.add(self.dq, dq)
        k_rows.add(dkv[0], dk)
        k_rows.add(dkv[1], dv)

    def _add_bias(self, call: Call, dbias: Tensor | None) -> None:
        if self.dbias is None or dbias is None:
            return
        for dim in (0, 1):  # where the bias is shared
            if self.dbias.shape[dim] == 1:
                dbias = dbias.sum(dim, keepdim=True)
        self.dbias[..., slice(*call.blocks[0].q), _keys(call)] += dbias


class Rows:
    """Ranges of rows of a tensor: a view where it is one range, an index otherwise."""

    def __init__(self, ranges: Sequence[Range], device: torch.device) -> None:
        self._slice = slice(*ranges[0]) if len(ranges) == 1 else None
        self._index = None if self._slice else index_of(tuple(ranges), device)

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the rows."""
        if self._index is not None:
            return x.index_select(dim, self._index)
        return x[self._slice] if dim == 0 else x[..., self._slice]

    def put(self, x: Tensor, rows: Tensor) -> None:
        """Overwrite the rows."""
        if self._index is not None:
            x.index_copy_(0, self._index, rows)
        else:
            x[self._slice] = rows

    def add(self, x: Tensor, rows: Tensor) -> None:
        """Add to the rows."""
        if self._index is not None:
            x.index_add_(0, self._index, rows.to(x.dtype))
        else:
            x[self._slice] += rows


@torch.no_grad()
def largest_in_calls(rule: Rule, inputs: Inputs, k: Tensor, calls: Iterable[Call]) -> Tensor:
    """Return the largest score of each head, (N,), in float32."""
    found = inputs.q.new_full((inputs.q.shape[2],), float("-inf"), dtype=torch.float32)
    for call in calls:
        for block in call.blocks:
            q, keys = (
                x[slice(*where)].transpose(0, 1) for x, where in ((inputs.q, block.q), (k, block.k))
            )
            bias = inputs.bias_of(Call((block,)))
            largest = reference.largest(q, keys, rule.scale, call.window, bias)
            found = torch.maximum(found, largest.to(found.dtype))
    return found


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


def zeros_like(x: Tensor) -> Tensor:
    """Return contiguous zeros in which gradients of x are summed."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _keys(call: Call) -> slice:
    block = call.blocks[0]
    return slice(block.k_start, block.k_start + block.k[1] - block.k[0])


def _statistics(lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return a maximum and a sum of exponentials, (rows, B, N, 8), that make up a log-sum-exp."""
    lse = lse.permute(2, 0, 1).unsqueeze(-1).expand(-1, -1, -1, COPIES)
    return lse.clamp_min(torch.finfo(lse.dtype).min), (lse > float("-inf")).to(lse.dtype)


def _documents(call: Call, device: torch.device) -> Documents:
    lengths = [[end - start for start, end in ranges] for ranges in (call.q, call.k)]
    of_q, of_k = (
        torch.tensor([0, *accumulate(n)], dtype=torch.int32).to(device, non_blocking=True)
        for n in lengths
    )
    return Documents(of_q, of_k, max(lengths[0]), max(lengths[1]))
