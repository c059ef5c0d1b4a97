"""SwiGLU experts on gathered tokens as one autograd function.

out_t = sum over the rows r of token t: w_r * second_e swiglu(first_e x_t). Backward needs the
tokens (T, H) and the pre-activation (R, 2F); nothing else of that size is kept. The activation is
recomputed where its gradient is, and the gradient of a routing weight is the dot product of the
activation with its gradient, so that the output of an expert is not needed either. The sums of
rows run in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mindspeed.ops.expert_mlp.quack_impl import choose
from mindspeed.ops.expert_mlp.reference import ExpertRows, Kernels
from mindspeed.parallel.tensor.grouped_linear import GroupedWeightGradients, WeightGemm, together
from mindspeed.parallel.tensor.linear import DeferredGradients


class ExpertMatrices(NamedTuple):
    """One of the two linears of all experts, and where the gradients of its weights go."""

    weights: Sequence[Tensor]
    """E matrices (out, in)"""
    fused: bool = False
    """Add each dW to `weight.main_grad` and show autograd a placeholder."""
    deferred: DeferredGradients | None = None
    """Queue that takes the computation of all dW instead of doing it in backward."""


def expert_mlp(
    x: Tensor,
    routing_weights: Tensor,
    rows: ExpertRows,
    first: ExpertMatrices,
    second: ExpertMatrices,
) -> Tensor:
    """Return the sum of the outputs of each token's experts, each times its routing weight.

    Args:
        x: (T, H) tokens.
        routing_weights: (R,) a factor for each row, in the order of rows.
        rows: which rows belong to which token and expert.
        first: [gate; up] of each expert, (2F, H).
        second: (H, F) of each expert.
    """
    plans = tuple(
        GroupedWeightGradients(tuple(one.weights), one.fused, one.deferred)
        for one in (first, second)
    )
    return _ExpertMLP.apply(x, routing_weights, rows, plans, *first.weights, *second.weights)


class _ExpertMLP(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        routing_weights: Tensor,
        rows: ExpertRows,
        plans: tuple[GroupedWeightGradients, GroupedWeightGradients],
        *weights: Tensor,
    ) -> Tensor:
        first, second = _matrices(weights, x.dtype)
        ctx.kernels = kernels = choose(x, first, rows)
        preact, y = kernels.gated(x, first, rows)
        out = rows.add_up(kernels.project(y, second, rows), routing_weights)
        ctx.save_for_backward(x, preact, routing_weights, *rows, *weights)
        ctx.plans = plans
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, preact, routing_weights, *rest = ctx.saved_tensors
        rows, weights = ExpertRows(*rest[:4]), rest[4:]
        kernels: Kernels = ctx.kernels
        needs_x, _, _, _, *needs_weight = ctx.needs_input_grad
        first, second = _matrices(weights, x.dtype)
        needs_first, needs_second = needs_weight[: len(first)], needs_weight[len(first) :]
        # Two GEMMs read the gradient of the output.
        laid_out = kernels.laid_out(grad, rows, (1 + any(needs_second)) * second.shape[2])
        grad_preact, weighted, grad_weights = kernels.gated_gradient(
            laid_out[0], second, preact, routing_weights, laid_out[1]
        )
        first_plan, second_plan = ctx.plans
        # What is computed later keeps tokens, not their rows.
        grad, grad_rows = (grad, rows) if second_plan.is_put_off else laid_out
        del laid_out
        gemm = functools.partial(kernels.second_gradient, grad, weighted, grad_rows)
        grads_second = _take(second_plan, WeightGemm(gemm, x.dtype), needs_second)
        del gemm, grad, weighted
        grad_x = None
        if needs_x:
            grad_x = rows.add_up(kernels.input_gradient(grad_preact, first, rows))
        gemm = functools.partial(kernels.first_gradient, grad_preact, x, rows)
        grads_first = _take(first_plan, WeightGemm(gemm, x.dtype), needs_first)
        return grad_x, grad_weights, None, None, *grads_first, *grads_second


def _take(
    plan: GroupedWeightGradients, gemm: WeightGemm, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return what autograd gets for each weight."""
    if not any(needed):
        return [None] * len(needed)
    gradients = plan.take(gemm)
    return [one if is_needed else None for one, is_needed in zip(gradients, needed, strict=True)]


def _matrices(weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the matrices of all experts, (E, 2F, H) and (E, H, F)."""
    half = len(weights) // 2
    return together(weights[:half]).to(dtype), together(weights[half:]).to(dtype)
