"""y = x (W + B A)^T + b for one shard of a frozen W, where only A and B have gradients.

A and B go along in the product with W, so that no wide activation is read or written for them: as
columns beside W where its output is the wider side, as rows below it where its input is. So does
SwiGLU where a kernel computes it with the product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.ops.swiglu import paired, swiglu_gradient
from mindspeed.ops.swiglu.origin import origin, remember_ahead
from mindspeed.parallel.tensor.collectives import all_gather, reduce_scatter


class _LowRankLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inner: Tensor,
        outer: Tensor,
        gather_group: ProcessGroup | None,
    ) -> Tensor:
        rows = all_gather(x, gather_group)
        factors = weight.to(x.dtype), inner.to(x.dtype), outer.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        out, low = _multiply(rows.flatten(0, -2), *factors, bias)
        # A part would keep the whole that it was computed in.
        ctx.save_for_backward(x, weight, inner, outer, low.contiguous())
        ctx.gather_group = gather_group
        return out.view(*rows.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner, outer, low = ctx.saved_tensors
        rows, grad_x = grad.flatten(0, -2), None
        a, b = inner.to(grad.dtype), outer.to(grad.dtype)
        if ctx.needs_input_grad[0]:
            # What x goes through, the other way round: the factors change places.
            out, grad_low = _multiply(rows, weight.to(grad.dtype).t(), b.t(), a.t())
            grad_x = reduce_scatter(out.view(*grad.shape[:-1], -1), ctx.gather_group)
        else:
            grad_low = rows @ b
        grad_inner = grad_low.t() @ all_gather(x, ctx.gather_group).flatten(0, -2)
        grad_outer = rows.t() @ low
        return grad_x, None, None, grad_inner.to(inner.dtype), grad_outer.to(outer.dtype), None


class _LowRankLinearOfSwiGLU(Function):
    """The product with swiglu(packed), which backward computes again instead of keeping it.

    packed is [gate | up] (..., 2F), or their pairs (..., F, 2).
    """

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, x: Tensor, weight: Tensor, inner: Tensor, outer: Tensor
    ) -> Tensor:
        factors = weight.to(x.dtype), inner.to(x.dtype), outer.to(x.dtype)
        out, low = _multiply(x.flatten(0, -2), *factors)
        ctx.save_for_backward(packed, weight, inner, outer, low.contiguous())
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, weight, inner, outer, low = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_low = rows @ outer.to(grad.dtype)
        joined = _join(rows, grad_low, 1).view(*grad.shape[:-1], -1)
        whole = _join(weight.to(grad.dtype), inner.to(grad.dtype), 0)
        if packed.dim() > grad.dim():
            grad_packed, x = paired.gradient(joined, whole, packed)
        else:
            grad_packed, x = swiglu_gradient(joined @ whole, packed)
        grad_inner = grad_low.t() @ x.flatten(0, -2)
        grad_outer = rows.t() @ low
        return grad_packed, None, None, grad_inner.to(inner.dtype), grad_outer.to(outer.dtype)


class _LowRankGatedLinear(Function):
    """The product with [gate; up], and SwiGLU of it by the same kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        inner: Tensor,
        outer: Tensor,
        gather_group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        whole = all_gather(x, gather_group)
        rows = whole.flatten(0, -2)
        low = rows @ inner.to(x.dtype).t()
        joined = _join(rows, low, 1).view(*whole.shape[:-1], -1)
        pairs, y = paired.product(joined, _join(weight.to(x.dtype), outer.to(x.dtype), 1))
        ctx.save_for_backward(x, weight, inner, outer, low)
        ctx.gather_group = gather_group
        ctx.mark_non_differentiable(y)
        ctx.set_materialize_grads(False)  # y has none, and zeros instead would be as large as y
        return pairs, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner, outer, low = ctx.saved_tensors
        a, b = inner.to(grad.dtype), outer.to(grad.dtype)
        rows = grad.flatten(-2).flatten(0, -2)
        both = rows @ rows_of_pairs(weight.to(grad.dtype), b)
        grad_low = both[:, x.shape[-1] :]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = both[:, : x.shape[-1]].addmm_(grad_low, a)
            grad_x = reduce_scatter(grad_x.view(*grad.shape[:-2], -1), ctx.gather_group)
        grad_inner = grad_low.t() @ all_gather(x, ctx.gather_group).flatten(0, -2)
        grad_outer = (rows.t() @ low).unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        return grad_x, None, grad_inner.to(inner.dtype), grad_outer.to(outer.dtype), None


def _multiply(
    x: Tensor, weight: Tensor, inner: Tensor, outer: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return x (W + B A)^T + b and x A^T, which may be a part of a larger matrix."""
    size_out, size_in = weight.shape
    if size_out >= size_in:
        low = x @ inner.t()
        return F.linear(_join(x, low, 1), _join(weight, outer, 1), bias), low
    both = x @ _join(weight, inner, 0).t()
    low = both[:, size_out:]
    out = both[:, :size_out].addmm_(low, outer.t())  # rows with a gap: norms read such as they are
    return out if bias is None else out.add_(bias), low


def _join(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Return two matrices one behind the other, as they lie in memory."""
    if not a.is_contiguous() and a.t().is_contiguous():
        return _join(a.t(), b.t(), 1 - dim).t()
    sizes = {one.shape[1] * one.element_size() % 8 for one in (a, b)}
    if dim == 0 or sizes != {0} or not (a.is_contiguous() and b.is_contiguous()):
        return torch.cat((a, b), dim)
    # Rows are copied element by element: four times as fast as elements of eight bytes.
    return torch.cat((a.view(torch.int64), b.view(torch.int64)), 1).view(a.dtype)


def rows_of_pairs(weight: Tensor, outer: Tensor) -> Tensor:
    """Return [W | B] of [gate; up] with rows of gate and up in turn, as pairs have their columns.

    Any product takes it then: that of pairs with [gate; up] as it is has tiles that some more
    columns do not fill.
    """
    parts = (weight, outer)
    if all(part.is_contiguous() and part[0].nbytes % 8 == 0 for part in parts):
        parts = (weight.view(torch.int64), outer.view(torch.int64))  # as in _join
    turned = [part.unflatten(0, (2, -1)).transpose(0, 1) for part in parts]
    return torch.cat(turned, 2).flatten(0, 1).view(weight.dtype)


def low_rank_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inner: Tensor,
    outer: Tensor,
    *,
    gather_group: ProcessGroup | None = None,
) -> Tensor:
    """Multiply by one shard of a frozen weight and of the product of two factors.

    Args:
        x: (..., in); with `gather_group`, this rank's part along dim 0. An x that remembers to be
            a SwiGLU output is not kept for backward.
        weight: (out, in), without a gradient.
        bias: (out,), without a gradient.
        inner: (rank, in)
        outer: (out, rank)
        gather_group: ranks that hold the other parts of the sequence.
    """
    packed = origin(x)
    if packed is not None and packed.requires_grad and bias is None and gather_group is None:
        return _LowRankLinearOfSwiGLU.apply(packed, x.detach(), weight, inner, outer)
    return _LowRankLinear.apply(x, weight, bias, inner, outer, gather_group)


def low_rank_gated_linear(
    x: Tensor,
    weight: Tensor,
    inner: Tensor,
    outer: Tensor,
    *,
    gather_group: ProcessGroup | None = None,
) -> Tensor:
    """Do the same with W = [gate; up], where `paired.serves` says that it can be done so.

    Returns the pairs (..., F, 2) of gate and up, which remember their SwiGLU for the next to ask.
    """
    pairs, y = _LowRankGatedLinear.apply(x, weight, inner, outer, gather_group)
    return remember_ahead(pairs, y)
