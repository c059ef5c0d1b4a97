"""x W^T for W = [gate; up], with SwiGLU of it computed by the same kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.ops.swiglu import paired
from mindspeed.ops.swiglu.origin import remember_ahead
from mindspeed.parallel.tensor.collectives import all_gather, reduce_scatter
from mindspeed.parallel.tensor.linear import DeferredGradients, WeightGradient, main_grad_of


class _PairedWeightGradient(WeightGradient):
    """dW = [dgate; dup] of the gradient of pairs."""

    __slots__ = ()

    def _accumulate(self, x: Tensor, grad: Tensor) -> None:
        x = all_gather(x, self.gather_group)
        paired.add_weight_gradient(main_grad_of(self.weight), grad, x)

    def _product(self, x: Tensor, grad: Tensor) -> Tensor:
        return paired.weight_gradient(grad, all_gather(x, self.gather_group))


class _GatedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, plan: _PairedWeightGradient
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        pairs, y = paired.product(all_gather(x, plan.gather_group), weight.to(x.dtype))
        ctx.mark_non_differentiable(y)
        ctx.set_materialize_grads(False)  # y has none, and zeros instead would be as large as y
        return pairs, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = paired.input_gradient(grad, weight.to(grad.dtype))
            grad_x = reduce_scatter(grad_x, ctx.plan.gather_group)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.plan.take(x, grad)
        return grad_x, grad_weight, None


def gated_linear(
    x: Tensor,
    weight: Tensor,
    *,
    gather_group: ProcessGroup | None = None,
    fused: bool = False,
    deferred: DeferredGradients | None = None,
) -> Tensor:
    """Multiply by one weight shard, where `paired.serves` says that it can be done so.

    Args and what becomes of dW are those of `linear`, weight (2F, in). Returns the pairs
    (..., F, 2) of gate and up, which remember their SwiGLU for the next to ask.
    """
    plan = _PairedWeightGradient(weight, gather_group, fused, deferred)
    pairs, y = _GatedLinear.apply(x, weight, plan)
    return remember_ahead(pairs, y)
