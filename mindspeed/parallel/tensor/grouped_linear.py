"""y_g = x_g W_g^T for consecutive groups of rows, with dW delivered as `linear` delivers it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mindspeed.ops.gmm import gmm
from mindspeed.ops.groupmatmul_add_fp32 import groupmatmul_add_fp32
from mindspeed.parallel.tensor.linear import (
    DeferredGradients,
    dummy_gradient,
    main_grad_of,
    scheduled_gradients,
)

_ONES = 8  # rows of ones that sum a group; fewer would not be aligned for every implementation


@dataclass(frozen=True, slots=True)
class WeightGemm:
    """The GEMM of all weight gradients: `run(None)` returns them (E, out, in).

    `run(totals)` adds them to E matrices of float32, or float64 for inputs of that dtype.
    """

    run: Callable[[Sequence[Tensor] | None], Tensor | None]
    dtype: torch.dtype
    """Of its inputs."""

    def compute(self) -> Tensor:
        """Return all gradients."""
        stacked = self.run(None)
        assert stacked is not None
        return stacked


@dataclass(frozen=True, slots=True)
class GroupedWeightGradients:
    """Where the gradients of all weights go, and when they are computed."""

    weights: tuple[Tensor, ...]
    fused: bool
    deferred: DeferredGradients | None

    @property
    def is_put_off(self) -> bool:
        """Whether gradients are computed after backward of the layer."""
        return self.deferred is not None or scheduled_gradients(self.weights[0]) is not None

    def take(self, gemm: WeightGemm) -> Sequence[Tensor | None]:
        """Return what autograd gets for each weight: dW, a placeholder, or nothing yet."""
        scheduled = scheduled_gradients(self.weights[0])
        if scheduled is not None:
            scheduled.put(functools.partial(self._add, gemm))
            return self._placeholders()
        if self.deferred is not None:
            self.deferred.put(functools.partial(self._run_later, gemm))
        elif not self.fused:
            return self._compute(gemm)
        else:
            self._accumulate(gemm)
        return self._placeholders() if self.fused else [None] * len(self.weights)

    def _run_later(self, gemm: WeightGemm) -> None:
        if self.fused:
            self._accumulate(gemm)
            return
        for weight, update in zip(self.weights, self._compute(gemm), strict=True):
            weight.grad = update if weight.grad is None else weight.grad + update

    def _add(self, gemm: WeightGemm) -> None:
        if self.fused:
            self._accumulate(gemm)
            return
        for weight, update in zip(self.weights, self._compute(gemm), strict=True):
            main_grad_of(weight).add_(update)

    def _accumulate(self, gemm: WeightGemm) -> None:
        totals = [main_grad_of(weight) for weight in self.weights]
        if totals[0].dtype == torch.promote_types(gemm.dtype, torch.float32):
            gemm.run(totals)
            return
        for total, update in zip(totals, self._compute(gemm), strict=True):
            total.add_(update)

    def _compute(self, gemm: WeightGemm) -> Sequence[Tensor]:
        return gemm.compute().to(self.weights[0].dtype).unbind()

    def _placeholders(self) -> Sequence[Tensor | None]:
        first = self.weights[0]
        if not hasattr(first, "grad_added_to_main_grad"):
            return [None] * len(self.weights)
        for weight in self.weights:
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # Megatron's
        like = first.expand(len(self.weights), *first.shape)
        return dummy_gradient(like, zero=getattr(first, "zero_out_wgrad", False)).unbind()


def _multiply_groups(
    x: Tensor, grad: Tensor, ends: Tensor, totals: Sequence[Tensor] | None
) -> Tensor | None:
    if totals is not None:
        groupmatmul_add_fp32(grad, x, ends, totals)
        return None
    stacked = gmm(grad.t(), x, group_list=ends, group_type=2)
    return stacked.view(len(ends), grad.shape[1], x.shape[1])


class _GroupedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ends: Tensor,
        bias: Tensor | None,
        plan: GroupedWeightGradients,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        ctx.plan = plan
        matrices = together(weights).to(x.dtype).transpose(1, 2)
        bias = None if bias is None else bias.to(x.dtype)
        out: Tensor = gmm(x, matrices, bias=bias, group_list=ends)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        needs_x, _, needs_bias, _, *needs_weight = ctx.needs_input_grad
        grad_x = grad_bias = None
        grad_weights: Sequence[Tensor | None] = [None] * len(weights)
        if needs_x:
            grad_x = gmm(grad, together(weights).to(grad.dtype), group_list=ends)
        if needs_bias:
            sums = gmm(grad.new_ones(_ONES, len(grad)), grad, group_list=ends, group_type=2)
            grad_bias = sums[::_ONES]
        if any(needs_weight):
            gemm = functools.partial(_multiply_groups, x, grad, ends)
            taken = ctx.plan.take(WeightGemm(gemm, x.dtype))
            grad_weights = [
                one if it else None for one, it in zip(taken, needs_weight, strict=True)
            ]
        return grad_x, None, grad_bias, None, *grad_weights


def grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    ends: Tensor,
    *,
    bias: Tensor | None = None,
    fused: bool = False,
    deferred: DeferredGradients | None = None,
) -> Tensor:
    """Multiply each group of rows by its own weight.

    Args:
        x: (M, in)
        weights: one (out, in) a group.
        ends: (E,) the row behind the last of each group, on the device of x.
        bias: (E, out)
        fused: add each dW to `weight.main_grad` and show autograd a placeholder.
        deferred: queue that takes the computation of all dW instead of doing it in backward.
    """
    plan = GroupedWeightGradients(tuple(weights), fused, deferred)
    return _GroupedLinear.apply(x, ends, bias, plan, *weights)


def together(weights: Sequence[Tensor]) -> Tensor:
    """Return all matrices as one tensor (E, ...): a view where they lie evenly in one storage."""
    first, last = weights[0], weights[-1]
    if len(weights) == 1:
        return first.unsqueeze(0)
    pointers = [weight.data_ptr() for weight in weights]
    step = (pointers[1] - pointers[0]) // first.itemsize
    is_even = (
        step >= first.numel()
        and pointers == list(range(pointers[0], pointers[-1] + 1, step * first.itemsize))
        and all(weight.is_contiguous() for weight in weights)
        # What lies between two parts of a storage is a part of it.
        and first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    )
    if not is_even:
        return torch.stack(list(weights))
    return first.as_strided((len(weights), *first.shape), (step, *first.stride()))
