"""Cross entropy over a split vocabulary, in plain torch.

Rank r of the group holds columns [r * V, (r + 1) * V) of the logits. Communication is two
all-reduces, of one and of three numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: ProcessGroup | None = None,
    *,
    smoothing: float = 0.0,
    ignore_index: int = -100,
    in_place: bool = False,
) -> Tensor:
    """Return the float32 loss of every token: logits (..., V on this rank), target (...).

    Args:
        logits: computed in float32; float64 stays float64.
        target: indices into the whole vocabulary.
        group: the ranks that the vocabulary is split over; None if it is not split.
        smoothing: label smoothing, the part of the target's weight spread over the vocabulary.
        ignore_index: a target whose tokens have loss and gradient zero.
        in_place: backward may write the gradient over the logits; they must have no other reader.
    """
    return _CrossEntropy.apply(logits, target, group, smoothing, ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        group: ProcessGroup | None,
        smoothing: float,
        ignore_index: int,
    ) -> Tensor:
        width = logits.shape[-1]
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        shifted = _shift_by_maximum(logits, group)

        column = (target - rank * width).unsqueeze(-1)
        here = (column >= 0) & (column < width)
        column = column.clamp(0, width - 1)
        picked = shifted.gather(-1, column).where(here, 0.0)
        total = shifted.sum(-1, keepdim=True)
        weights = shifted.exp_()
        sums = torch.cat([picked, total, weights.sum(-1, keepdim=True)], dim=-1)
        if ranks > 1:
            dist.all_reduce(sums, group=group)
        picked, total, norm = sums.split(1, dim=-1)

        even = smoothing / (width * ranks)
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
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * grad_loss.unsqueeze(-1)).to(grad.dtype), None, None, None, None


def _shift_by_maximum(logits: Tensor, group: ProcessGroup | None) -> Tensor:
    # A new tensor in float32 (float64 for float64 logits), which the caller may overwrite.
    logits_acc = logits.to(torch.promote_types(logits.dtype, torch.float32))
    maximum = logits_acc.max(-1, keepdim=True).values
    if group is not None and group.size() > 1:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    return logits_acc - maximum


def check(logits: Tensor, target: Tensor, *_: Any, smoothing: float = 0.0, **__: Any) -> None:
    """Raise ValueError for targets of the wrong shape or dtype and for invalid smoothing."""
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} need a target of shape {tuple(logits.shape[:-1])}, "
            f"got {tuple(target.shape)}"
        )
    if target.is_floating_point():
        raise ValueError(f"cross_entropy needs an integer target, got {target.dtype}")
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"label smoothing must be at least 0 and below 1, got {smoothing}")
