"""Output layer and cross entropy by slices of the vocabulary: cuBLAS products, Triton in between.

Sliced by vocabulary, not by tokens, every row of the weight's gradient is written once, whole and
unrounded; only the gradient of the tokens, which is small, is summed over slices. As many logits as
the plan finds room for stay for backward, and their gradient takes their place; the others are
computed again. Backward knows the weight of each token, so a loss mask costs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.ops.cross_entropy.triton_impl import Running, Task, write_gradient
from mindspeed.ops.launch import multiprocessors
from mindspeed.ops.linear_cross_entropy import reference
from mindspeed.ops.linear_cross_entropy.plan import Plan, make_plan
from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32
from mindspeed.ops.matmul_add_fp32.main_grad import add_to_main_grad, placeholder

TILE = 128  # columns of a slice for each multiprocessor: none waits for the others


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: ProcessGroup | None = None,
    *,
    ignore_index: int = -100,
    fused: bool = False,
    memory: int = reference.MEMORY,
) -> Tensor:
    """Return the float32 loss of every token, cross_entropy(hidden @ weight^T, labels)."""
    if hidden.dtype == torch.float64:
        return reference.linear_cross_entropy(
            hidden, weight, labels, group, ignore_index=ignore_index, fused=fused
        )
    task = Task.of(len(weight), group, 0.0, ignore_index)
    rows = hidden.reshape(-1, hidden.shape[-1])
    plan = plan_for(rows, weight, memory, fused)
    loss = _LinearCrossEntropy.apply(rows, weight, labels.flatten(), task, plan, fused)
    return loss.view(labels.shape)


def plan_for(rows: Tensor, weight: Tensor, memory: int, fused: bool) -> Plan:
    """Cut the vocabulary of `weight` so that no multiprocessor waits for the others."""
    capacity, width = memory // max(len(rows) * rows.element_size(), 1), TILE * multiprocessors()
    is_trained = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    return make_plan(
        len(rows),
        *weight.shape,
        capacity=capacity if is_trained else min(capacity, width),
        width=width,
        has_gradient=is_trained and weight.requires_grad and not fused,
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        labels: Tensor,
        task: Task,
        plan: Plan,
        fused: bool,
    ) -> Tensor:
        buffer = rows.new_empty(plan.buffer_size)
        gradient = weight.new_empty(weight.shape) if plan.in_gradient else None
        running = Running(labels, task)
        for index in reversed(range(len(plan.slices))):  # those that are not kept come first
            logits = plan.place(index, buffer, gradient)
            _write_logits(rows, weight, plan.slices[index], logits)
            running.add(logits, plan.slices[index].start, is_last=index == 0)
        loss, lse = running.finish()
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(rows, weight, labels, lse, buffer, gradient)
            ctx.task, ctx.plan = task, plan
            # With saved-tensor hooks autograd would hand back a weight without attributes.
            ctx.weight = weight if fused else None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, labels, lse, buffer, grad_weight = ctx.saved_tensors
        plan, grad_loss = ctx.plan, grad_loss.contiguous()
        torch.autograd.graph.increment_version(buffer)  # a second backward is told
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        grad_rows = _Sum(rows) if needs_rows else None
        if grad_weight is None and needs_weight and ctx.weight is None:
            grad_weight = torch.empty_like(weight)
        for index, part in enumerate(plan.slices):
            logits = plan.place(index, buffer, grad_weight)
            if index >= plan.kept:
                _write_logits(rows, weight, part, logits)
            write_gradient(logits, labels, lse, grad_loss, ctx.task, grad=logits, start=part.start)
            if grad_rows is not None:
                grad_rows.add_product(logits, weight[part], is_only=len(plan.slices) == 1)
            if grad_weight is not None:
                torch.mm(logits.t(), rows, out=grad_weight[part])
            elif needs_weight:
                add_to_main_grad(ctx.weight.main_grad[part], rows, logits)
        if needs_weight and ctx.weight is not None:
            grad_weight = placeholder(ctx.weight)
        given = None if grad_rows is None else grad_rows.value()
        return given, grad_weight, None, None, None, None


def _write_logits(rows: Tensor, weight: Tensor, part: slice, logits: Tensor) -> None:
    torch.mm(rows, weight[part].t(), out=logits)


class _Sum:
    """A sum of products like `rows`, in float32 until it is complete."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._sum: Tensor | None = None

    def add_product(self, grad: Tensor, weight: Tensor, *, is_only: bool) -> None:
        """Add grad @ weight; the only one needs no sum, and is rounded once by the product."""
        if is_only:
            self._sum = torch.mm(grad, weight)
            return
        if self._sum is None:
            self._sum = torch.zeros_like(self._rows, dtype=torch.float32)
        matmul_add_fp32(weight, grad.t(), self._sum)

    def value(self) -> Tensor | None:
        """Return the sum in the type of the rows."""
        return None if self._sum is None else self._sum.to(self._rows.dtype)
