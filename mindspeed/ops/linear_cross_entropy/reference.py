"""Output layer and cross entropy in plain torch: the logits of all tokens, then their loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed.ops.cross_entropy import reference
from mindspeed.ops.matmul_add_fp32.main_grad import add_to_main_grad, placeholder

MEMORY = int(1.9 * 2**30)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: ProcessGroup | None = None,
    *,
    ignore_index: int = -100,
    fused: bool = False,
    memory: int = MEMORY,
) -> Tensor:
    """Return the float32 loss of every token, cross_entropy(hidden @ weight^T, labels).

    Args:
        hidden: (..., H), all tokens on every rank. Its gradient is this rank's partial sum; the
            caller that copied or gathered the tokens reduces it.
        weight: (V on this rank, H), of hidden's dtype.
        labels: (...), indices into the whole vocabulary.
        group: the ranks that the vocabulary is split over; None if it is not split.
        ignore_index: a label whose tokens have loss and gradient zero.
        fused: add the gradient of weight to `weight.main_grad` and return a placeholder.
        memory: bytes of logits that may be saved for backward, beside those stored in the memory
            of the weight's gradient; the rest is recomputed.
    """
    logits = _Linear.apply(hidden, weight, fused)
    return reference.cross_entropy(logits, labels, group, ignore_index=ignore_index)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, fused: bool) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.weight = weight if fused else None
        return hidden @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad_hidden = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_hidden, None, None
        if ctx.weight is None:
            return grad_hidden, grad.flatten(0, -2).t() @ hidden.flatten(0, -2), None
        add_to_main_grad(ctx.weight.main_grad, hidden.flatten(0, -2), grad.flatten(0, -2))
        return grad_hidden, placeholder(ctx.weight), None


def check(hidden: Tensor, weight: Tensor, labels: Tensor, *_: Any, **options: Any) -> None:
    """Raise ValueError for mismatched shapes and dtypes, and for a missing main_grad."""
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"linear_cross_entropy needs a weight of shape (V, {hidden.shape[-1]}) for hidden "
            f"{tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy needs labels of shape {tuple(hidden.shape[:-1])}, "
            f"got {tuple(labels.shape)}"
        )
    if weight.dtype != hidden.dtype:
        raise ValueError(
            f"linear_cross_entropy needs hidden and weight of one dtype, got {hidden.dtype} "
            f"and {weight.dtype}"
        )
    if options.get("fused") and getattr(weight, "main_grad", None) is None:
        raise ValueError(
            "linear_cross_entropy(fused=True) adds to weight.main_grad and this weight has none: "
            "wrap the model in Megatron's DistributedDataParallel or set fused=False"
        )
    if options.get("memory", MEMORY) <= 0:
        raise ValueError(f"memory must be more than 0 bytes, got {options['memory']}")
