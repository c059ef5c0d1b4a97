"""Cross entropy of logits whose vocabulary is split over a process group.

Rank r of the group holds columns [r * V, (r + 1) * V) of the logits. Two all-reduces, of one and of
three numbers a token, are all that travels; no rank sees another rank's logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from mindspeed.parallel.tensor.collectives import group_rank, group_size


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    smoothing: float = 0.0,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the float32 loss of every token: logits (..., V on this rank), target (...).

    Tokens whose target is `ignore_index` have loss and gradient zero. `smoothing` spreads that
    share of the target's weight over the vocabulary. Without a group the vocabulary is whole.
    """
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} need a target of shape {tuple(logits.shape[:-1])}, "
            f"got {tuple(target.shape)}"
        )
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"label smoothing must be at least 0 and below 1, got {smoothing}")
    return _CrossEntropy.apply(logits, target, group, smoothing, ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        group: dist.ProcessGroup | None,
        smoothing: float,
        ignore_index: int,
    ) -> torch.Tensor:
        size, width = group_size(group), logits.shape[-1]
        shifted = _shift_by_maximum(logits, group)

        column = (target - group_rank(group) * width).unsqueeze(-1)
        here = (column >= 0) & (column < width)
        column = column.clamp(0, width - 1)
        picked = shifted.gather(-1, column).where(here, 0.0)
        total = shifted.sum(-1, keepdim=True)
        weights = shifted.exp_()
        sums = torch.cat([picked, total, weights.sum(-1, keepdim=True)], dim=-1)
        if size > 1:
            dist.all_reduce(sums, group=group)
        picked, total, norm = sums.split(1, dim=-1)

        even = smoothing / (width * size)
        counted = (target != ignore_index).unsqueeze(-1)
        loss = torch.log(norm) - (1 - smoothing) * picked
        if smoothing:  # not otherwise: a logit of -inf would make 0 * total a NaN
            loss = loss - even * total
        if ctx.needs_input_grad[0]:
            # d loss / d logits is known by now. Kept in the dtype of the logits it costs no more
            # than they do, and nothing has to be communicated in backward.
            grad = weights.div_(norm)
            if smoothing:
                grad.sub_(even)
            grad.scatter_add_(-1, column, here.to(grad.dtype) * (smoothing - 1))
            ctx.save_for_backward(grad.mul_(counted).to(logits.dtype))
        return loss.where(counted, 0.0).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * grad_loss.unsqueeze(-1)).to(grad.dtype), None, None, None, None


def _shift_by_maximum(logits: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    # A fresh tensor in float32 (float64 for float64 logits), which the caller may overwrite.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    maximum = wide.max(-1, keepdim=True).values
    if group_size(group) > 1:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    return wide - maximum
