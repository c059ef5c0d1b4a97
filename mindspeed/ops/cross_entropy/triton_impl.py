"""Cross entropy in Triton: the logits are read once forward, read and written once backward.

The gradient is computed in backward, where the weight of each token is known, so that a loss mask
costs nothing and the gradient can overwrite the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.ops.cross_entropy import reference
from mindspeed.ops.launch import launch

# A tile of 512 x 8: eight bfloat16 are one 16-byte load of one thread, which keeps a maximum and a
# sum of its own; threads are reduced once, at the end of the row.
FORWARD_M, FORWARD_N, NUM_WARPS = 512, 8, 8
BACKWARD_N = 4096
LOWEST = tl.constexpr(-3.0e38)  # finite: inf - inf is NaN


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
    spec = LossSpec.of(logits.shape[-1], group, smoothing, ignore_index)
    return _CrossEntropy.apply(logits, target, spec, in_place)


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The options of a loss, and which part of the vocabulary this rank holds."""

    group: ProcessGroup | None
    first: int
    """The first column of the vocabulary that this rank holds."""
    vocabulary: int
    smoothing: float
    ignore_index: int

    @classmethod
    def of(
        cls, width: int, group: ProcessGroup | None, smoothing: float, ignore_index: int
    ) -> LossSpec:
        """Describe a vocabulary of `width` columns on each rank of the group."""
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        # With one rank the kernel computes the loss without communication.
        group = group if ranks > 1 else None
        return cls(group, rank * width, ranks * width, smoothing, ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, spec: LossSpec, in_place: bool) -> Tensor:
        logits, target = logits.contiguous(), target.contiguous()
        online = OnlineLoss(target.flatten(), spec)
        online.add(logits.flatten(0, -2), 0, is_last=True)
        loss, lse = online.result()
        ctx.save_for_backward(logits, target, lse)
        ctx.spec, ctx.in_place = spec, in_place
        return loss.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse = ctx.saved_tensors
        grad = logits if ctx.in_place else torch.empty_like(logits)
        rows = grad_loss.float().contiguous().flatten()
        write_gradient(logits, target.flatten(), lse, rows, ctx.spec, grad=grad)
        if ctx.in_place:
            # Another function that saved the logits, or a second backward, gets an error.
            torch.autograd.graph.increment_version(logits)
        return grad, None, None, None


class OnlineLoss:
    """Loss and log-sum-exp of every token, accumulated over slices of the vocabulary."""

    def __init__(self, target: Tensor, spec: LossSpec) -> None:
        self._target, self._spec = target, spec
        self._loss = target.new_empty(target.shape, dtype=torch.float32)
        self._lse = torch.empty_like(self._loss)
        # Maximum, sum of exponentials relative to it, the target's logit, sum of logits.
        self._stats: Tensor | None = None

    def add(self, logits: Tensor, start: int, *, is_last: bool) -> None:
        """Add logits (T, w), the columns from `start` on of those that this rank holds."""
        rows, width = logits.shape
        spec, is_first = self._spec, self._stats is None
        is_final = is_last and spec.group is None
        if is_first and not is_final:
            self._stats = self._loss.new_empty((4, rows))
        if not rows:
            return
        launch(
            cross_entropy_forward,
            (rows,),
            logits,
            self._target,
            self._stats,
            self._loss,
            self._lse,
            rows,
            width,
            spec.first + start,
            spec.smoothing,
            spec.smoothing / spec.vocabulary,
            spec.ignore_index,
            IS_FIRST=is_first,
            IS_LAST=is_final,
            HAS_SMOOTHING=spec.smoothing > 0,
            BLOCK_M=FORWARD_M,
            BLOCK_N=FORWARD_N,
            num_warps=NUM_WARPS,
        )

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the loss and the log-sum-exp of every token over the whole vocabulary."""
        spec = self._spec
        if spec.group is None or self._stats is None:
            return self._loss, self._lse
        maximum, *_ = self._stats
        global_max = maximum.clone()
        dist.all_reduce(global_max, op=dist.ReduceOp.MAX, group=spec.group)
        sums = self._stats[1:].clone()
        sums[0] *= torch.exp(maximum - global_max)
        dist.all_reduce(sums, group=spec.group)
        sum_exp, target_logit, sum_logits = sums
        log_sum = torch.log(sum_exp)
        loss = log_sum + (global_max - target_logit)
        if spec.smoothing:
            mean_logit = sum_logits / spec.vocabulary
            loss = loss + spec.smoothing * (target_logit - mean_logit)
        return loss.where(self._target != spec.ignore_index, 0.0), log_sum + global_max


def write_gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    spec: LossSpec,
    *,
    grad: Tensor,
    start: int = 0,
) -> None:
    """Write d loss / d logits, times the gradient of each loss, to `grad`; it may be `logits`."""
    width, rows = logits.shape[-1], target.numel()
    if not rows:
        return
    blocks = triton.cdiv(width, BACKWARD_N)
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
        spec.first + start,
        1.0 - spec.smoothing,
        spec.smoothing / spec.vocabulary,
        spec.ignore_index,
        BLOCK_N=BACKWARD_N,
        num_warps=NUM_WARPS,
    )


@triton.jit
def cross_entropy_forward(
    logits_ptr,
    target_ptr,
    stats_ptr,
    loss_ptr,
    lse_ptr,
    num_rows,
    N,
    start_n,
    smoothing,
    smoothing_per_class,
    ignore_index,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Reduce a row of logits, continuing from the running statistics, to them or to its loss."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    is_counted = target != ignore_index
    row_ptr = logits_ptr + row * N
    offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    maxima = tl.full((BLOCK_M,), LOWEST, tl.float32)
    sums = tl.zeros((BLOCK_M,), tl.float32)
    logit_sums = tl.zeros((BLOCK_M,), tl.float32)
    # A token that does not count is not read.
    for offset in range(0, tl.where(is_counted, N, 0), BLOCK_M * BLOCK_N):
        offs_n = offset + offs
        x = tl.load(row_ptr + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)
        new_maxima = tl.maximum(maxima, tl.max(x, axis=1))
        sums = sums * tl.exp(maxima - new_maxima) + tl.sum(tl.exp(x - new_maxima[:, None]), axis=1)
        maxima = new_maxima
        if HAS_SMOOTHING:
            logit_sums += tl.sum(tl.where(offs_n < N, x, 0.0), axis=1)
    maximum = tl.max(maxima, axis=0)
    total_exp = tl.where(is_counted, tl.sum(sums * tl.exp(maxima - maximum), axis=0), 1.0)
    total_logits = tl.sum(logit_sums, axis=0)
    column = target - start_n
    is_local = (column >= 0) & (column < N)
    target_logit = tl.load(row_ptr + column, mask=is_local, other=0.0).to(tl.float32)

    if not IS_FIRST:
        old_maximum = tl.load(stats_ptr + row)
        new_maximum = tl.maximum(maximum, old_maximum)
        total_exp = total_exp * tl.exp(maximum - new_maximum)
        total_exp += tl.load(stats_ptr + num_rows + row) * tl.exp(old_maximum - new_maximum)
        target_logit += tl.load(stats_ptr + 2 * num_rows + row)
        total_logits += tl.load(stats_ptr + 3 * num_rows + row)
        maximum = new_maximum
    if IS_LAST:
        log_sum = tl.log(total_exp)
        loss = log_sum + (maximum - target_logit)
        if HAS_SMOOTHING:
            loss += smoothing * target_logit - smoothing_per_class * total_logits
        tl.store(loss_ptr + row, tl.where(is_counted, loss, 0.0))
        tl.store(lse_ptr + row, log_sum + maximum)
    else:
        tl.store(stats_ptr + row, maximum)
        tl.store(stats_ptr + num_rows + row, total_exp)
        tl.store(stats_ptr + 2 * num_rows + row, target_logit)
        tl.store(stats_ptr + 3 * num_rows + row, total_logits)


@triton.jit
def cross_entropy_backward(
    logits_ptr,
    target_ptr,
    lse_ptr,
    grad_loss_ptr,
    grad_ptr,
    N,
    blocks_n,
    start_n,
    confidence,
    smoothing_per_class,
    ignore_index,
    BLOCK_N: tl.constexpr,
):
    """Write a block of a row of gradients; grad_ptr may be logits_ptr."""
    row = (tl.program_id(0) // blocks_n).to(tl.int64)
    offs_n = tl.program_id(0) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    target = tl.load(target_ptr + row).to(tl.int64)
    is_counted = target != ignore_index
    mask = offs_n < N
    load_mask = offs_n < tl.where(is_counted, N, 0)
    offs = row * N + offs_n
    x = tl.load(logits_ptr + offs, mask=load_mask, other=-float("inf")).to(tl.float32)
    grad = tl.exp(x - tl.load(lse_ptr + row)) - smoothing_per_class
    grad = tl.where(offs_n == target - start_n, grad - confidence, grad)
    grad *= tl.load(grad_loss_ptr + row)
    tl.store(
        grad_ptr + offs, tl.where(is_counted, grad, 0.0).to(grad_ptr.dtype.element_ty), mask=mask
    )
