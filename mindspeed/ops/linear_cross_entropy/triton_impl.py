"""Output layer and cross entropy by slices of the vocabulary: cuBLAS products, Triton in between.

Sliced by vocabulary, not by tokens, every row of the weight's gradient is written once, whole and
unrounded; only the gradient of the tokens, which is small, is summed over slices. As many logits as
`memory` holds stay for backward, and their gradient takes their place; the others are computed
again. Backward knows the weight of each token, so a loss mask costs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.ops.cross_entropy.triton_impl import Running, Task, write_gradient
from mindspeed.ops.linear_cross_entropy import reference
from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32
from mindspeed.ops.matmul_add_fp32.main_grad import add_to_main_grad, placeholder

Slices = tuple[slice, ...]
ALIGNMENT = 256  # columns: whole tiles of cuBLAS


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
    slices = cut(len(rows) * rows.element_size(), len(weight), memory)
    loss = _LinearCrossEntropy.apply(rows, weight, labels.flatten(), task, slices, fused)
    return loss.view(labels.shape)


def cut(column_bytes: int, vocabulary: int, memory: int) -> Slices:
    """Cut the vocabulary into slices whose logits fit into memory; the first is the widest."""
    columns = memory // max(column_bytes, 1)
    width = vocabulary if columns >= vocabulary else max(columns // ALIGNMENT, 1) * ALIGNMENT
    starts = range(0, vocabulary, max(width, 1))
    return tuple(slice(start, min(start + width, vocabulary)) for start in starts)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        labels: Tensor,
        task: Task,
        slices: Slices,
        fused: bool,
    ) -> Tensor:
        buffer = rows.new_empty(len(rows) * (slices[0].stop - slices[0].start))
        running = Running(labels, task)
        for part in reversed(slices):  # the first comes last, and stays for backward
            logits = _logits(rows, weight, part, buffer)
            running.add(logits, part.start, is_last=part is slices[0])
        loss, lse = running.finish()
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(rows, weight, labels, lse, logits)
            ctx.task, ctx.slices = task, slices
            # With saved-tensor hooks autograd would hand back a weight without attributes.
            ctx.weight = weight if fused else None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, labels, lse, logits = ctx.saved_tensors
        torch.autograd.graph.increment_version(logits)  # a second backward is told
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        grad_rows = _Sum(rows) if needs_rows else None
        grad_weight = torch.empty_like(weight) if needs_weight and ctx.weight is None else None
        buffer, grad_loss = logits.view(-1), grad_loss.contiguous()
        for part in ctx.slices:
            if part is not ctx.slices[0]:
                logits = _logits(rows, weight, part, buffer)
            write_gradient(logits, labels, lse, grad_loss, ctx.task, grad=logits, start=part.start)
            if grad_rows is not None:
                grad_rows.add_product(logits, weight[part], is_only=len(ctx.slices) == 1)
            if grad_weight is not None:
                torch.mm(logits.t(), rows, out=grad_weight[part])
            elif needs_weight:
                add_to_main_grad(ctx.weight.main_grad[part], rows, logits)
        if needs_weight and ctx.weight is not None:
            grad_weight = placeholder(ctx.weight)
        given = None if grad_rows is None else grad_rows.value()
        return given, grad_weight, None, None, None, None


def _logits(rows: Tensor, weight: Tensor, part: slice, buffer: Tensor) -> Tensor:
    """Compute the logits of one slice into the buffer, contiguous."""
    width = part.stop - part.start
    logits = buffer[: len(rows) * width].view(len(rows), width)
    return torch.mm(rows, weight[part].t(), out=logits)


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
