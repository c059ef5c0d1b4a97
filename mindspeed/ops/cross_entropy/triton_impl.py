"""Cross entropy in Triton: the logits are read once forward, read and written once backward.

The gradient is computed in backward, where the weight of each token is known, so that a loss mask
costs nothing and the gradient can take the place of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.ops.cross_entropy import reference
from mindspeed.ops.cross_entropy.kernels import cross_entropy_backward, cross_entropy_forward
from mindspeed.ops.launch import launch

# A tile of LANES x 8: eight bfloat16 are one 16-byte load of one thread, which keeps a maximum and
# a sum of its own; threads meet once, at the end of the row.
LANES, WIDE, WARPS = 512, 8, 8
BLOCK = 4096


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: ProcessGroup | None = None,
    *,
    smoothing: float = 0.0,
    ignore_index: int = -100,
    in_place: bool = False,
) -> Tensor:
    """Return the float32 loss of every token: logits (..., V on this rank), target (...)."""
    if logits.dtype == torch.float64:
        return reference.cross_entropy(
            logits, target, group, smoothing=smoothing, ignore_index=ignore_index
        )
    task = Task.of(logits.shape[-1], group, smoothing, ignore_index)
    return _CrossEntropy.apply(logits, target, task, in_place)


@dataclass(frozen=True, slots=True)
class Task:
    """What is the same for every token."""

    group: ProcessGroup | None
    first: int
    """The first column of the vocabulary that this rank holds."""
    vocabulary: int
    smoothing: float
    ignore_index: int

    @classmethod
    def of(
        cls, width: int, group: ProcessGroup | None, smoothing: float, ignore_index: int
    ) -> Task:
        """Place `width` columns on each rank of the group."""
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        # A group of one is no group: the kernel finishes the loss by itself.
        group = group if ranks > 1 else None
        return cls(group, rank * width, ranks * width, smoothing, ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, task: Task, in_place: bool) -> Tensor:
        logits, target = logits.contiguous(), target.contiguous()
        running = Running(target.flatten(), task)
        running.add(logits.flatten(0, -2), 0, is_last=True)
        loss, lse = running.finish()
        ctx.save_for_backward(logits, target, lse)
        ctx.task, ctx.in_place = task, in_place
        return loss.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse = ctx.saved_tensors
        grad = logits if ctx.in_place else torch.empty_like(logits)
        rows = grad_loss.float().contiguous().flatten()
        write_gradient(logits, target.flatten(), lse, rows, ctx.task, grad=grad)
        if ctx.in_place:
            # Whoever kept the logits for a backward of its own is told, a second backward too.
            torch.autograd.graph.increment_version(logits)
        return grad, None, None, None


class Running:
    """Loss and log-sum-exp of every token, over as many slices of the vocabulary as come."""

    def __init__(self, target: Tensor, task: Task) -> None:
        self._target, self._task = target, task
        self._loss = target.new_empty(target.shape, dtype=torch.float32)
        self._lse = torch.empty_like(self._loss)
        # Largest logit, sum of exponentials under it, the target's logit, sum of logits.
        self._statistics: Tensor | None = None

    def add(self, logits: Tensor, start: int, *, is_last: bool) -> None:
        """Take in logits (T, w), the columns from `start` on of those that this rank holds."""
        rows, width = logits.shape
        task, is_first = self._task, self._statistics is None
        finishes = is_last and task.group is None
        if is_first and not finishes:
            self._statistics = self._loss.new_empty((4, rows))
        if not rows:
            return
        launch(
            cross_entropy_forward,
            (rows,),
            logits,
            self._target,
            self._statistics,
            self._loss,
            self._lse,
            rows,
            width,
            task.first + start,
            task.smoothing,
            task.smoothing / task.vocabulary,
            task.ignore_index,
            IS_FIRST=is_first,
            FINISHES=finishes,
            SMOOTHS=task.smoothing > 0,
            LANES=LANES,
            WIDE=WIDE,
            num_warps=WARPS,
        )

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the loss and the log-sum-exp of every token over the whole vocabulary."""
        task = self._task
        if task.group is None or self._statistics is None:
            return self._loss, self._lse
        top, *_ = self._statistics
        highest = top.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=task.group)
        sums = self._statistics[1:].clone()
        sums[0] *= torch.exp(top - highest)
        dist.all_reduce(sums, group=task.group)
        norm, picked, total = sums
        log_norm = torch.log(norm)
        loss = log_norm + (highest - picked)
        if task.smoothing:
            even = total / task.vocabulary
            loss = loss + task.smoothing * (picked - even)
        return loss.where(self._target != task.ignore_index, 0.0), log_norm + highest


def write_gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    task: Task,
    *,
    grad: Tensor,
    start: int = 0,
) -> None:
    """Write d loss / d logits, times the weight of each token, into `grad`; it may be `logits`."""
    width, rows = logits.shape[-1], target.numel()
    if not rows:
        return
    blocks = triton.cdiv(width, BLOCK)
    launch(
        cross_entropy_backward,
        (rows * blocks,),
        logits,
        target,
        lse,
        grad_loss,
        grad,
        width,
        blocks,
        task.first + start,
        1.0 - task.smoothing,
        task.smoothing / task.vocabulary,
        task.ignore_index,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
