"""Attention to keys and values that every rank gathers from all ranks, forward and backward.

Memory grows with the whole sequence, messages are fewer and larger than those of a ring. Gradients
of keys and values are summed by a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mindspeed.distributed.collectives import (
    all_gather_uneven,
    reduce_scatter_uneven,
    resolve_group,
)
from mindspeed.parallel.context.blocks import Call
from mindspeed.parallel.context.layout import sequence_order
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


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    members: Members,
    rule: Rule,
    *,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Return the attention (S, B, N, V) of this rank's queries to the keys of all ranks."""
    return _GatheredAttention.apply(q, k, v, bias, slopes, (members, rule))


class _GatheredAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        slopes: Tensor | None,
        job: tuple[Members, Rule],
    ) -> Tensor:
        members, rule = ctx.job = job
        inputs, merged = Inputs(q, bias, slopes), MergedOutput(q, v.shape[-1])
        key, value = gather_rows([k, v], members)
        for call in _calls(members, rule, inputs):
            merged.add(call.q, *attend(rule, inputs, key, value, call))
        out, lse = merged.result()
        ctx.save_for_backward(q, k, v, bias, slopes, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, slopes, out, lse = ctx.saved_tensors
        members, rule = ctx.job
        grads = Gradients(Inputs(q, bias, slopes), grad, out, lse)
        kv = gather_rows([k, v], members)
        dkv = [zeros_like(x) for x in kv]
        for call in _calls(members, rule, grads.inputs):
            grads.add(rule, kv, dkv, call)
        dk, dv = _scatter(dkv, members)
        tensors = (grads.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), grads.dbias)
        return *tensors, None, None


def gather_rows(tensors: Sequence[Tensor], members: Members) -> list[Tensor]:
    """Return the rows of all ranks in the order of the sequence; one message for all tensors."""
    sizes = [packed_size(tensors, n) for n in members.rows]
    flat = all_gather_uneven(pack(*tensors), sizes, resolve_group(members.group))
    parts = zip(*(unpack(x, tensors, n) for x, n in zip(flat, members.rows)))
    return [members.layout.unshard(torch.cat(part)) for part in parts]


def _scatter(grads: Sequence[Tensor], members: Members) -> list[Tensor]:
    """Sum gradients of the rows of all ranks over the ranks; return those of this rank's rows."""
    order = sequence_order(members.layout, grads[0].device)
    if order is not None:
        back = torch.argsort(order)
        grads = [x.index_select(0, back) for x in grads]
    parts = [pack(*pair) for pair in zip(*(x.split(members.rows) for x in grads))]
    total = reduce_scatter_uneven(parts, resolve_group(members.group))
    return unpack(total, grads, members.rows[members.rank])


def _calls(members: Members, rule: Rule, inputs: Inputs) -> Iterator[Call]:
    layout = members.layout
    return rule.calls(layout.ranges[members.rank], layout.covered, inputs)
