"""The layer norm function behind Megatron's FusedLayerNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """Layer norm with weight and bias, computed in float32 at least, in the dtype of the input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: torch.Size,
        eps: float = 1e-6,
    ) -> Tensor:
        """Normalise the last dimensions of x."""
        wide = torch.promote_types(x.dtype, torch.float32)
        out, mean, inverse_std = torch.native_layer_norm(
            x.to(wide), normalized_shape, weight.to(wide), bias.to(wide), eps
        )
        ctx.normalized_shape = normalized_shape
        ctx.save_for_backward(x, weight, bias, mean, inverse_std)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight, bias, mean, inverse_std = ctx.saved_tensors
        wide = mean.dtype
        grads = torch.ops.aten.native_layer_norm_backward(
            grad.to(wide),
            x.to(wide),
            ctx.normalized_shape,
            mean,
            inverse_std,
            weight.to(wide),
            bias.to(wide),
            list(ctx.needs_input_grad[:3]),
        )
        typed = (None if g is None else g.to(of.dtype) for g, of in zip(grads, (x, weight, bias)))
        return *typed, None, None
