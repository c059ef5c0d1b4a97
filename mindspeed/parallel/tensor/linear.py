"""y = x W^T + b for one shard of W, with dW delivered where Megatron wants it.

x may be this rank's part of the sequence: it is gathered for the GEMM, and gathered again in
backward instead of being kept. dW goes to autograd, straight into `W.main_grad`, or into a queue.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.distributed.collectives import all_gather, reduce_scatter
from mindspeed.ops.column_sum import column_sum
from mindspeed.ops.matmul_add_fp32.main_grad import add_to_main_grad, placeholder


class DeferredGradients:
    """Weight gradients that backward left for later, first in first out."""

    def __init__(self) -> None:
        self._pending: deque[Callable[[], None]] = deque()

    def put(self, compute: Callable[[], None]) -> None:
        """Queue one computation."""
        self._pending.append(compute)

    @torch.no_grad()
    def run(self, count: int) -> None:
        """Run the oldest computations."""
        if count > len(self._pending):
            raise RuntimeError(
                f"backward_dw() wants {count} weight gradients and {len(self._pending)} wait: "
                "call it once after each backward"
            )
        for _ in range(count):
            self._pending.popleft()()


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """How dW is computed and where it goes."""

    # Autograd hands back a saved parameter without its attributes when saved-tensor hooks are
    # active (offloading, recompute), so the parameter itself is kept here.
    weight: Tensor
    gather_group: ProcessGroup | None
    fused: bool
    deferred: DeferredGradients | None

    def take(self, x: Tensor, grad: Tensor) -> Tensor | None:
        """Return what autograd gets: dW, a placeholder for it, or nothing yet."""
        scheduled = scheduled_gradients(self.weight)
        if scheduled is not None:
            scheduled.put(functools.partial(self._add, x, grad))
            return placeholder(self.weight)
        if self.deferred is not None:
            self.deferred.put(functools.partial(self._run_later, x, grad))
        elif not self.fused:
            return self._compute(x, grad).to(self.weight.dtype)
        else:
            self._accumulate(x, grad)
        return placeholder(self.weight) if self.fused else None

    def _run_later(self, x: Tensor, grad: Tensor) -> None:
        if self.fused:
            self._accumulate(x, grad)
            return
        grad_weight = self._compute(x, grad).to(self.weight.dtype)
        weight = self.weight
        weight.grad = grad_weight if weight.grad is None else weight.grad + grad_weight

    def _add(self, x: Tensor, grad: Tensor) -> None:
        if self.fused:
            self._accumulate(x, grad)
        else:
            main_grad_of(self.weight).add_(self._compute(x, grad).to(self.weight.dtype))

    def _accumulate(self, x: Tensor, grad: Tensor) -> None:
        rows = all_gather(x, self.gather_group).flatten(0, -2)
        add_to_main_grad(main_grad_of(self.weight), rows, grad.flatten(0, -2))

    def _compute(self, x: Tensor, grad: Tensor) -> Tensor:
        rows = all_gather(x, self.gather_group).flatten(0, -2)
        return grad.flatten(0, -2).t() @ rows


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: WeightGradient
    ) -> Tensor:
        # A frozen weight, as beside adapters, has no gradient that needs x.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.plan = plan
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(x.dtype)
        x = all_gather(x, plan.gather_group)
        if weight.requires_grad or bias is not None:
            return F.linear(x, weight.to(x.dtype), bias)
        # What torch does with a weight that is trained: a frozen copy of it gives the same bits.
        rows = F.linear(x.flatten(0, -2), weight.to(x.dtype))
        # No view: autograd forbids in-place changes of one, and Megatron adds experts' biases so.
        return torch.ops.aten._unsafe_view(rows, [*x.shape[:-1], rows.shape[-1]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = reduce_scatter(grad @ weight.to(grad.dtype), ctx.plan.gather_group)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.plan.take(x, grad)
        if ctx.needs_input_grad[2]:
            grad_bias = column_sum(grad.flatten(0, -2), ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gather_group: ProcessGroup | None = None,
    fused: bool = False,
    deferred: DeferredGradients | None = None,
) -> Tensor:
    """Multiply by one weight shard.

    Args:
        x: (..., in); with `gather_group`, this rank's part along dim 0.
        weight: (out, in), cast to x's dtype for the GEMM.
        bias: (out,)
        gather_group: ranks that hold the other parts of the sequence.
        fused: add dW to `weight.main_grad` and show autograd a placeholder.
        deferred: queue that takes the computation of dW instead of doing it in backward.
    """
    plan = WeightGradient(weight, gather_group, fused, deferred)
    return _Linear.apply(x, weight, bias, plan)


def scheduled_gradients(weight: Tensor) -> DeferredGradients | None:
    """Return the queue of the pipeline schedule that decides when dW is added to main_grad."""
    # Of the parameter and not of the module: recompute and local layers know no more than that.
    queue: DeferredGradients | None = getattr(weight, "scheduled_gradients", None)
    return queue


def dummy_gradient(like: Tensor, zero: bool) -> Tensor:
    """Return a gradient whose value is not read, or zeros where Megatron reads it."""
    make = torch.zeros_like if zero else torch.empty_like
    return make(like, memory_format=torch.contiguous_format)


def main_grad_of(weight: Tensor) -> Tensor:
    """Return the buffer that Megatron sums this weight's gradients in."""
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            "gradient accumulation fusion adds to weight.main_grad and this weight has none: "
            "wrap the model in Megatron's DistributedDataParallel "
            "or set gradient_accumulation_fusion=False"
        )
    return main_grad
