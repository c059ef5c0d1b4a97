"""Weight gradients in `main_grad`, the buffer in which Megatron accumulates them."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.matmul_add_fp32 import matmul_add_fp32


def add_to_main_grad(main_grad: Tensor, rows: Tensor, grad: Tensor) -> None:
    """Add grad (T, V)^T @ rows (T, H) to main_grad (V, H)."""
    if main_grad.dtype == torch.promote_types(rows.dtype, torch.float32):
        matmul_add_fp32(rows, grad, main_grad)
    else:
        main_grad.add_(grad.t() @ rows)


def placeholder(weight: Tensor, like: Tensor | None = None) -> Tensor | None:
    """Return a dummy gradient for autograd: Megatron's hooks run only where there is one.

    `like` is the tensor whose gradient it is, where that is a view of the weight.
    """
    like = weight if like is None else like
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        # A tied weight: the embedding's gradient is added to this one at the end of backward. An
        # expanded zero takes no memory until then.
        return like.new_zeros(()).expand_as(like)
    return torch.empty_like(like)
