"""y = x (W + B A)^T + b for one shard of a frozen W, where only A and B have gradients.

A and B take part in the GEMM with W, so that no wide activation is read or written for them: as
columns beside W where its output is the wider side, as rows below it where its input is. The
functions around SwiGLU are those of `swiglu_linear`, with the factors in their GEMMs.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.distributed.collectives import all_gather, reduce_scatter
from mindspeed.ops.append_matmul import append_matmul
from mindspeed.ops.swiglu import gemm_swiglu
from mindspeed.parallel.tensor.frozen_weight import FrozenWeight
from mindspeed.parallel.tensor.swiglu_linear import recompute_swiglu


class _LowRankLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: FrozenWeight,
        bias: Tensor | None,
        inner: Tensor,
        outer: Tensor,
        gather_group: ProcessGroup | None,
    ) -> Tensor:
        rows = all_gather(x, gather_group)
        bias = None if bias is None else bias.to(x.dtype)
        factors = inner.to(x.dtype), outer.to(x.dtype)
        out, low = _multiply(rows.flatten(0, -2), weight, *factors, bias)
        ctx.save_for_backward(x, inner, outer, low)
        ctx.weight, ctx.gather_group = weight, gather_group
        return out.view(*rows.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, outer, low = ctx.saved_tensors
        rows, grad_x = grad.flatten(0, -2), None
        a, b = inner.to(grad.dtype), outer.to(grad.dtype)
        if ctx.needs_input_grad[0]:
            out, grad_low = _multiply_transposed(rows, ctx.weight, a, b)
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
        weight: FrozenWeight,
        inner: Tensor,
        outer: Tensor,
        gather_group: ProcessGroup | None,
        keeps_preact: bool,
    ) -> tuple[Tensor | None, Tensor]:
        whole = all_gather(x, gather_group)
        joined, low = append_matmul(whole.flatten(0, -2), inner.to(x.dtype))
        joined = joined.view(*whole.shape[:-1], -1)
        joined_weight = weight.beside(outer.to(x.dtype))
        preact, y = gemm_swiglu.gemm_swiglu(joined, joined_weight, keeps_preact=keeps_preact)
        ctx.save_for_backward(x, inner, outer, low)
        ctx.weight, ctx.gather_group = weight, gather_group
        ctx.mark_non_differentiable(y)
        ctx.set_materialize_grads(False)  # y has none, and zeros instead would be as large as y
        return preact, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, outer, low = ctx.saved_tensors
        a, b = inner.to(grad.dtype), outer.to(grad.dtype)
        rows, tile_n = grad.flatten(-2).flatten(0, -2), gemm_swiglu.tile_for(x.shape[-1], len(a))
        joined = ctx.weight.beside(b, again=True)
        out, grad_low = _add_low(gemm_swiglu.input_gradient(grad, joined, tile_n).flatten(0, -2), a)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = reduce_scatter(out.view(*grad.shape[:-2], -1), ctx.gather_group)
        grad_inner = grad_low.t() @ all_gather(x, ctx.gather_group).flatten(0, -2)
        grad_outer = (rows.t() @ low).unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        return grad_x, None, grad_inner.to(inner.dtype), grad_outer.to(outer.dtype), None, None


class _LowRankSwiGLULinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        preact: Tensor,
        activated: Tensor,
        weight: FrozenWeight,
        inner: Tensor,
        outer: Tensor,
    ) -> Tensor:
        factors = inner.to(activated.dtype), outer.to(activated.dtype)
        out, low = _multiply(activated.flatten(0, -2), weight, *factors)
        ctx.save_for_backward(preact, inner, outer, low)
        ctx.weight = weight
        return out.view(*activated.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        preact, inner, outer, low = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        joined, grad_low = append_matmul(rows, outer.to(grad.dtype).t())
        joined = joined.view(*grad.shape[:-1], -1)
        joined_weight = ctx.weight.above(inner.to(grad.dtype), again=True)
        grad_preact, activated = recompute_swiglu(joined, joined_weight, preact)
        grad_inner = grad_low.t() @ activated.flatten(0, -2)
        grad_outer = rows.t() @ low
        return grad_preact, None, None, grad_inner.to(inner.dtype), grad_outer.to(outer.dtype)


def _multiply(
    x: Tensor, weight: FrozenWeight, inner: Tensor, outer: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return x (W + B A)^T + b and x A^T."""
    size_out, size_in = weight.shape
    if size_out >= size_in:
        joined, low = append_matmul(x, inner)
        return F.linear(joined, weight.beside(outer), bias), low
    out, low = _add_low(x @ weight.above(inner).t(), outer.t())
    # A part would keep the whole that it was computed in.
    return out if bias is None else out.add_(bias), low.contiguous()


def _multiply_transposed(
    grad: Tensor, weight: FrozenWeight, inner: Tensor, outer: Tensor
) -> tuple[Tensor, Tensor]:
    """Return grad (W + B A) and grad B, in backward."""
    size_out, size_in = weight.shape
    if size_in >= size_out:
        joined, low = append_matmul(grad, outer.t())
        return joined @ weight.above(inner, again=True), low
    return _add_low(grad @ weight.beside(outer, again=True), inner)


def _add_low(both: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Add to the first columns of a matrix what a factor (rank, n) makes of the others."""
    size = factor.shape[1]
    low = both[:, size:]
    return both[:, :size].addmm_(low, factor), low  # rows with a stride: norms read them in place


def low_rank_linear(
    x: Tensor,
    weight: FrozenWeight,
    bias: Tensor | None,
    inner: Tensor,
    outer: Tensor,
    *,
    gather_group: ProcessGroup | None = None,
) -> Tensor:
    """Multiply by one shard of a frozen weight plus the matmul of two factors.

    Args:
        x: (..., in); with `gather_group`, this rank's part along dim 0.
        weight: (out, in).
        bias: (out,), without a gradient.
        inner: (rank, in)
        outer: (out, rank)
        gather_group: ranks that hold the other parts of the sequence.
    """
    return _LowRankLinear.apply(x, weight, bias, inner, outer, gather_group)


def low_rank_linear_swiglu(
    x: Tensor,
    weight: FrozenWeight,
    inner: Tensor,
    outer: Tensor,
    *,
    gather_group: ProcessGroup | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Multiply as `low_rank_linear` by W = [gate; up], and apply SwiGLU as `linear_swiglu`."""
    needs_preact = gemm_swiglu.needs_preact(x.dtype)
    return _LowRankLinearSwiGLU.apply(x, weight, inner, outer, gather_group, needs_preact)


def low_rank_swiglu_linear(
    preact: Tensor, activated: Tensor, weight: FrozenWeight, inner: Tensor, outer: Tensor
) -> Tensor:
    """Multiply swiglu(preact) as `low_rank_linear`, and recompute it as `swiglu_linear`."""
    return _LowRankSwiGLULinear.apply(preact, activated.detach(), weight, inner, outer)
