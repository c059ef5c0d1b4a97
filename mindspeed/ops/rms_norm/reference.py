"""RMSNorm in plain torch.

y = x * r * gamma with r = 1 / sqrt(mean(x^2) + epsilon) over the last dimension. The arithmetic is
float32 (float64 for float64 inputs) and y has the dtype of x. Kept for backward: x, gamma and r,
one number a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Divide x (..., H) by its root mean square over the last dimension, times gamma (H,)."""
    return _RMSNorm.apply(x, gamma, epsilon)


def add_rms_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return rms_norm(x + residual) in the dtype of x, and the sum in the dtype of residual."""
    total = (x + residual).to(residual.dtype)
    return _RMSNorm.apply(total, gamma, epsilon).to(x.dtype), total


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
        wide = _widen(x)
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, gamma, inverse_rms)
        return (wide * inverse_rms * gamma).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gamma, inverse_rms = ctx.saved_tensors
        normed = _widen(x) * inverse_rms
        grad = grad.to(normed.dtype)
        grad_gamma = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
        grad_normed = grad * gamma
        along = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = inverse_rms * (grad_normed - normed * along)
        return grad_x.to(x.dtype), grad_gamma.to(gamma.dtype), None


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
