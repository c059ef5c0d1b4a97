"""y = x (W + B A)^T + b for one shard of a frozen W, where only A and B have gradients.

A and B take part in the GEMM with W, so that no wide activation is read or written for them: as
columns beside W where its output is the wider side, as rows below it where its input is. The
functions around SwiGLU are those of `swiglu_linear`, with the factors in their GEMMs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.distributed.collectives import all_gather, reduce_scatter
from mindspeed.ops.swiglu import gemm_swiglu
from mindspeed.parallel.tensor.swiglu_linear import recompute_swiglu


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
            # The same GEMMs with W transposed: the factors swap roles.
            out, grad_low = _multiply(rows, weight.to(grad.dtype).t(), b.t(), a.t())
            grad_x = reduce_scatter(out.view(*grad.shape[:-1], -1), ctx.gather_group)
        else:
            grad_low = rows @ b
        grad_inner = grad_low.t() @ all_gather(x, ctx.gather_group).flatten(0, -2)
        grad_outer = rows.t() @ low
        return grad_x, None, None, grad_inner.to(inner.dtype), grad_outer.to(outer.dtype), None


class _LowRankLinearSwiGLU(Function):
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
        joined = _concat(rows, low, 1).view(*whole.shape[:-1], -1)
        joined_weight = _concat(weight.to(x.dtype), outer.to(x.dtype), 1)
        preact, y = gemm_swiglu.gemm_swiglu(joined, joined_weight)
        ctx.save_for_backward(x, weight, inner, outer, low)
        ctx.gather_group = gather_group
        ctx.mark_non_differentiable(y)
        ctx.set_materialize_grads(False)  # y has none, and zeros instead would be as large as y
        return preact, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner, outer, low = ctx.saved_tensors
        a, b = inner.to(grad.dtype), outer.to(grad.dtype)
        rows = grad.flatten(-2).flatten(0, -2)
        both = rows @ interleaved_rows(weight.to(grad.dtype), b)
        grad_low = both[:, x.shape[-1] :]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = both[:, : x.shape[-1]].addmm_(grad_low, a)
            grad_x = reduce_scatter(grad_x.view(*grad.shape[:-2], -1), ctx.gather_group)
        grad_inner = grad_low.t() @ all_gather(x, ctx.gather_group).flatten(0, -2)
        grad_outer = (rows.t() @ low).unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        return grad_x, None, grad_inner.to(inner.dtype), grad_outer.to(outer.dtype), None


class _LowRankSwiGLULinear(Function):
    @staticmethod
    def forward(
        ctx: Any, preact: Tensor, activated: Tensor, weight: Tensor, inner: Tensor, outer: Tensor
    ) -> Tensor:
        dtype = activated.dtype
        factors = weight.to(dtype), inner.to(dtype), outer.to(dtype)
        out, low = _multiply(activated.flatten(0, -2), *factors)
        ctx.save_for_backward(preact, weight, inner, outer, low.contiguous())
        return out.view(*activated.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        preact, weight, inner, outer, low = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_low = rows @ outer.to(grad.dtype)
        joined = _concat(rows, grad_low, 1).view(*grad.shape[:-1], -1)
        joined_weight = _concat(weight.to(grad.dtype), inner.to(grad.dtype), 0)
        grad_preact, activated = recompute_swiglu(joined, joined_weight, preact)
        grad_inner = grad_low.t() @ activated.flatten(0, -2)
        grad_outer = rows.t() @ low
        return grad_preact, None, None, grad_inner.to(inner.dtype), grad_outer.to(outer.dtype)


def _multiply(
    x: Tensor, weight: Tensor, inner: Tensor, outer: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return x (W + B A)^T + b and x A^T, which may be a part of a larger matrix."""
    size_out, size_in = weight.shape
    if size_out >= size_in:
        low = x @ inner.t()
        return F.linear(_concat(x, low, 1), _concat(weight, outer, 1), bias), low
    both = x @ _concat(weight, inner, 0).t()
    low = both[:, size_out:]
    out = both[:, :size_out].addmm_(low, outer.t())  # rows with a stride: norms read them in place
    return out if bias is None else out.add_(bias), low


def _concat(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Concatenate two matrices, in the memory layout that they have."""
    if not a.is_contiguous() and a.t().is_contiguous():
        return _concat(a.t(), b.t(), 1 - dim).t()
    sizes = {one.shape[1] * one.element_size() % 8 for one in (a, b)}
    if dim == 0 or sizes != {0} or not (a.is_contiguous() and b.is_contiguous()):
        return torch.cat((a, b), dim)
    # Rows are copied element by element: elements of eight bytes make it four times as fast.
    return torch.cat((a.view(torch.int64), b.view(torch.int64)), 1).view(a.dtype)


def interleaved_rows(weight: Tensor, outer: Tensor) -> Tensor:
    """Return [W | B] of [gate; up] with the rows of gate and up interleaved, as a preact's columns.

    Any GEMM takes it then: the one that reads [gate; up] as it is has tiles that a few more columns
    do not fill.
    """
    parts = (weight, outer)
    if all(part.is_contiguous() and part[0].nbytes % 8 == 0 for part in parts):
        parts = (weight.view(torch.int64), outer.view(torch.int64))  # as in _concat
    interleaved = [part.unflatten(0, (2, -1)).transpose(0, 1) for part in parts]
    return torch.cat(interleaved, 2).flatten(0, 1).view(weight.dtype)


def low_rank_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inner: Tensor,
    outer: Tensor,
    *,
    gather_group: ProcessGroup | None = None,
) -> Tensor:
    """Multiply by one shard of a frozen weight plus the matmul of two factors.

    Args:
        x: (..., in); with `gather_group`, this rank's part along dim 0.
        weight: (out, in), without a gradient.
        bias: (out,), without a gradient.
        inner: (rank, in)
        outer: (out, rank)
        gather_group: ranks that hold the other parts of the sequence.
    """
    return _LowRankLinear.apply(x, weight, bias, inner, outer, gather_group)


def low_rank_linear_swiglu(
    x: Tensor,
    weight: Tensor,
    inner: Tensor,
    outer: Tensor,
    *,
    gather_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiply as `low_rank_linear` by W = [gate; up], and apply SwiGLU as `linear_swiglu`."""
    return _LowRankLinearSwiGLU.apply(x, weight, inner, outer, gather_group)


def low_rank_swiglu_linear(
    preact: Tensor, activated: Tensor, weight: Tensor, inner: Tensor, outer: Tensor
) -> Tensor:
    """Multiply swiglu(preact) as `low_rank_linear`, and recompute it as `swiglu_linear`."""
    return _LowRankSwiGLULinear.apply(preact, activated.detach(), weight, inner, outer)
