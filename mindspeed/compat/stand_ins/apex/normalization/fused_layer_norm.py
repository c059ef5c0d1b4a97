"""The layer norm function behind Megatron's FusedLayerNorm."""

from __future__ import annotations

from collections.abc import Sequence
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


class MixedFusedLayerNorm(torch.nn.Module):
    """Layer norm whose input may be narrower than its weights; the output has their dtype."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        if not elementwise_affine:
            raise RuntimeError(
                "MixedFusedLayerNorm has a weight and a bias: use torch.nn.LayerNorm for one "
                "without (elementwise_affine=False)"
            )
        shape = [normalized_shape] if isinstance(normalized_shape, int) else normalized_shape
        self.normalized_shape, self.eps = torch.Size(shape), eps
        self.memory_efficient = memory_efficient
        self.weight = torch.nn.Parameter(torch.empty(self.normalized_shape))
        self.bias = torch.nn.Parameter(torch.empty(self.normalized_shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros."""
        torch.nn.init.ones_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimensions of the input."""
        dtype = torch.promote_types(input.dtype, self.weight.dtype)
        wide = FusedLayerNormAffineFunction.apply(
            input.to(dtype), self.weight, self.bias, self.normalized_shape, self.eps
        )
        return wide.to(self.weight.dtype)

    def extra_repr(self) -> str:
        """Name the shape and eps."""
        return f"{tuple(self.normalized_shape)}, eps={self.eps}"
