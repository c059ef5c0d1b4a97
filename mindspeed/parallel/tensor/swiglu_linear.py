"""The two linears around SwiGLU, as functions that share its input instead of keeping its output.

`linear_swiglu` computes x W^T for W = [gate; up] and SwiGLU of it by one kernel; `swiglu_linear`
multiplies by the next weight and keeps the pre-activation, from which backward recomputes SwiGLU in
the pass over it that the gradient needs anyway. They are two autograd functions rather than one:
the pre-activation is freed, and the second weight's gradient handed on, before the first one's
backward begins.

The pre-activation is [gate | up] (..., 2F), or interleaved (..., F, 2) where `linear_swiglu`
computed it.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.distributed.collectives import all_gather, reduce_scatter
from mindspeed.ops.swiglu import gemm_swiglu, swiglu_gradient
from mindspeed.parallel.tensor.linear import DeferredGradients, WeightGradient, main_grad_of


class _InterleavedWeightGradient(WeightGradient):
    """dW = [dgate; dup] from the gradient of an interleaved pre-activation."""

    __slots__ = ()

    def _accumulate(self, x: Tensor, grad: Tensor) -> None:
        x = all_gather(x, self.gather_group)
        gemm_swiglu.add_weight_gradient(main_grad_of(self.weight), grad, x)

    def _compute(self, x: Tensor, grad: Tensor) -> Tensor:
        return gemm_swiglu.weight_gradient(grad, all_gather(x, self.gather_group))


class _LinearSwiGLU(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, plan: _InterleavedWeightGradient, keeps_preact: bool
    ) -> tuple[Tensor | None, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        whole = all_gather(x, plan.gather_group)
        weight = weight.to(x.dtype)
        preact, y = gemm_swiglu.gemm_swiglu(whole, weight, keeps_preact=keeps_preact)
        ctx.mark_non_differentiable(y)
        ctx.set_materialize_grads(False)  # y has none, and zeros instead would be as large as y
        return preact, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = gemm_swiglu.input_gradient(grad, weight.to(grad.dtype))
            grad_x = reduce_scatter(grad_x, ctx.plan.gather_group)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.plan.take(x, grad)
        return grad_x, grad_weight, None, None


class _SwiGLULinear(Function):
    @staticmethod
    def forward(
        ctx: Any, preact: Tensor, activated: Tensor, weight: Tensor, plan: WeightGradient
    ) -> Tensor:
        ctx.save_for_backward(preact, weight)
        ctx.plan = plan
        return F.linear(activated, weight.to(activated.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        preact, weight = ctx.saved_tensors
        grad_preact, activated = recompute_swiglu(grad, weight.to(grad.dtype), preact)
        grad_weight = ctx.plan.take(activated, grad) if ctx.needs_input_grad[2] else None
        return grad_preact, None, grad_weight, None


def recompute_swiglu(grad: Tensor, weight: Tensor, preact: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of preact and swiglu(preact) for `grad` of swiglu(preact) weight^T."""
    if preact.dim() > grad.dim():
        return gemm_swiglu.gemm_swiglu_gradient(grad, weight, preact)
    return swiglu_gradient(grad @ weight, preact)


def linear_swiglu(
    x: Tensor,
    weight: Tensor,
    *,
    gather_group: ProcessGroup | None = None,
    fused: bool = False,
    deferred: DeferredGradients | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Multiply by one shard of [gate; up] and apply SwiGLU, where `gemm_swiglu.is_supported`.

    Args and the delivery of dW are those of `linear`, with weight (2F, in). Returns the interleaved
    pre-activation (..., F, 2), None where no backward needs it, and, without a gradient of its own,
    its SwiGLU (..., F).
    """
    plan = _InterleavedWeightGradient(weight, gather_group, fused, deferred)
    return _LinearSwiGLU.apply(x, weight, plan, gemm_swiglu.needs_preact(x.dtype))


def swiglu_linear(
    preact: Tensor,
    activated: Tensor,
    weight: Tensor,
    *,
    fused: bool = False,
    deferred: DeferredGradients | None = None,
) -> Tensor:
    """Multiply swiglu(preact), given as `activated` (..., F), by one weight shard (out, F).

    The gradient goes to `preact`; `activated` is recomputed in backward. The delivery of dW is that
    of `linear`.
    """
    plan = WeightGradient(weight, None, fused, deferred)
    return _SwiGLULinear.apply(preact, activated.detach(), weight, plan)
