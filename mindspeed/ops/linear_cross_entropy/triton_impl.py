"""Output layer and cross entropy by slices of the vocabulary: cuBLAS GEMMs, Triton in between.

Sliced by vocabulary, not by tokens, every row of the weight's gradient is written once, without
intermediate rounding; only the gradient of the tokens, which is small, is summed over slices. As
many logits as there is memory for are saved for backward, where their gradient overwrites them; the
others are recomputed. Backward knows the gradient of each token, so a loss mask costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.ops.cross_entropy.triton_impl import LossSpec, OnlineLoss, write_gradient
from mindspeed.ops.launch import multiprocessors
from mindspeed.ops.linear_cross_entropy import reference
from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32
from mindspeed.ops.matmul_add_fp32.main_grad import add_to_main_grad, placeholder

TILE = 128  # columns of a slice per multiprocessor: all finish together
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
    spec = LossSpec.of(len(weight), group, 0.0, ignore_index)
    rows = hidden.reshape(-1, hidden.shape[-1])
    plan = plan_for(rows, weight, memory, fused)
    loss = _LinearCrossEntropy.apply(rows, weight, labels.flatten(), spec, plan, fused)
    return loss.view(labels.shape)


def plan_for(rows: Tensor, weight: Tensor, memory: int, fused: bool) -> LogitsPlan:
    """Split the vocabulary of `weight` so that all multiprocessors finish a slice together."""
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
        spec: LossSpec,
        plan: LogitsPlan,
        fused: bool,
    ) -> Tensor:
        buffer = rows.new_empty(plan.buffer_size)
        gradient = weight.new_empty(weight.shape) if plan.in_gradient else None
        online = OnlineLoss(labels, spec)
        for index in reversed(range(len(plan.slices))):  # the recomputed ones first
            logits = plan.storage(index, buffer, gradient)
            _write_logits(rows, weight, plan.slices[index], logits)
            online.add(logits, plan.slices[index].start, is_last=index == 0)
        loss, lse = online.result()
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(rows, weight, labels, lse, buffer, gradient)
            ctx.spec, ctx.plan = spec, plan
            # With saved-tensor hooks autograd would return a weight without attributes.
            ctx.weight = weight if fused else None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, labels, lse, buffer, grad_weight = ctx.saved_tensors
        plan, grad_loss = ctx.plan, grad_loss.contiguous()
        torch.autograd.graph.increment_version(buffer)  # a second backward gets an error
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        grad_rows = _Fp32Sum(rows) if needs_rows else None
        if grad_weight is None and needs_weight and ctx.weight is None:
            grad_weight = torch.empty_like(weight)
        for index, part in enumerate(plan.slices):
            logits = plan.storage(index, buffer, grad_weight)
            if index >= plan.num_stored:
                _write_logits(rows, weight, part, logits)
            write_gradient(logits, labels, lse, grad_loss, ctx.spec, grad=logits, start=part.start)
            if grad_rows is not None:
                grad_rows.add_matmul(logits, weight[part], is_only=len(plan.slices) == 1)
            if grad_weight is not None:
                torch.mm(logits.t(), rows, out=grad_weight[part])
            elif needs_weight:
                add_to_main_grad(ctx.weight.main_grad[part], rows, logits)
        if needs_weight and ctx.weight is not None:
            grad_weight = placeholder(ctx.weight)
        grad_input = None if grad_rows is None else grad_rows.value()
        return grad_input, grad_weight, None, None, None, None


def _write_logits(rows: Tensor, weight: Tensor, part: slice, logits: Tensor) -> None:
    torch.mm(rows, weight[part].t(), out=logits)


class _Fp32Sum:
    """A sum of GEMMs with the shape of `rows`, in float32 until it is complete."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._sum: Tensor | None = None

    def add_matmul(self, grad: Tensor, weight: Tensor, *, is_only: bool) -> None:
        """Add grad @ weight; a single one needs no sum, and is rounded once by the GEMM."""
        if is_only:
            self._sum = torch.mm(grad, weight)
            return
        if self._sum is None:
            self._sum = torch.zeros_like(self._rows, dtype=torch.float32)
        matmul_add_fp32(weight, grad.t(), self._sum)

    def value(self) -> Tensor | None:
        """Return the sum in the dtype of the rows."""
        return None if self._sum is None else self._sum.to(self._rows.dtype)


@dataclass(frozen=True)
class LogitsPlan:
    """Slices of the vocabulary, all of one width but the last, and where their logits are stored.

    The first slices are stored at the end of the memory that will be the weight's gradient:
    backward fills it from the first row on, slice by slice, and has read each of them before it
    overwrites it. The next slices are stored in a buffer. Those that fit into neither are
    recomputed, at the start of the buffer.
    """

    slices: tuple[slice, ...]
    tokens: int
    in_gradient: int
    in_buffer: int

    @property
    def buffer_size(self) -> int:
        """Return the number of logits in the buffer."""
        end = self.slices[self.in_gradient + self.in_buffer - 1].stop
        return self.tokens * (end - self.slices[self.in_gradient].start)

    @property
    def num_stored(self) -> int:
        """Return the number of slices that backward need not recompute."""
        return self.in_gradient + self.in_buffer

    def storage(self, index: int, buffer: Tensor, gradient: Tensor | None) -> Tensor:
        """Return the memory of the logits of one slice, (tokens, columns)."""
        part = self.slices[index]
        slot = self.tokens * self.slices[0].stop
        memory, start = buffer, 0
        if index < self.in_gradient and gradient is not None:
            memory = gradient.view(-1)
            start = memory.numel() - (self.in_gradient - index) * slot
        elif index < self.num_stored:
            start = (index - self.in_gradient) * slot
        width = part.stop - part.start
        return memory[start : start + self.tokens * width].view(self.tokens, width)


def make_plan(
    tokens: int, vocabulary: int, hidden: int, *, capacity: int, width: int, has_gradient: bool
) -> LogitsPlan:
    """Split the vocabulary into slices of at most `width`, unless all fits into the buffer.

    Args:
        capacity: columns of logits that the buffer may hold.
        has_gradient: the memory of the weight's gradient (vocabulary, hidden) is available.
    """
    if capacity >= vocabulary:
        return LogitsPlan((slice(0, vocabulary),), tokens, 0, 1)
    width = min(width, max(capacity // ALIGNMENT, 1) * ALIGNMENT, vocabulary)
    starts = range(0, vocabulary, width)
    slices = tuple(slice(start, min(start + width, vocabulary)) for start in starts)
    in_gradient = _fit_in_gradient(tokens, vocabulary, hidden, width) if has_gradient else 0
    in_gradient = min(in_gradient, len(slices) - 1)
    in_buffer = min(len(slices) - in_gradient, max(capacity // width, 1))
    return LogitsPlan(slices, tokens, in_gradient, in_buffer)


def _fit_in_gradient(tokens: int, vocabulary: int, hidden: int, width: int) -> int:
    """Return the number of slices whose logits may be stored at the end of the gradient.

    With c of them the logits of slice i start at vocabulary * hidden - (c - i) * tokens * width,
    and the gradient of this slice, written while they are read, ends at (i + 1) * width * hidden.
    Both grow linearly with i: if the first and the last slice fit, all do.
    """
    first = (vocabulary - width) * hidden // max(tokens * width, 1)
    last = (vocabulary * hidden - tokens * width) // max(width * hidden, 1)
    return max(0, min(first, last))
