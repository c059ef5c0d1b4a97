"""RMSNorm in plain torch.

y = x * r * weight with r = 1 / sqrt(mean(x^2) + eps) over the last dimension. The arithmetic is
float32 (float64 for float64 inputs) and y has the dtype of x. Kept for backward: x, weight and r,
one number a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Divide x (..., H) by its root mean square over the last dimension, times weight (H,)."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm needs a weight of shape {tuple(x.shape[-1:])} for x of shape "
            f"{tuple(x.shape)}, got {tuple(weight.shape)}"
        )
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _widen(x)
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return (wide * inverse_rms * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        normed = _widen(x) * inverse_rms
        grad = grad.to(normed.dtype)
        grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
        grad_normed = grad * weight
        along = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = inverse_rms * (grad_normed - normed * along)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
