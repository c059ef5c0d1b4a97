"""The scores of a router on tensor cores, several times as fast as GEMMs of float32.

The product of two bfloat16 numbers is exact in float32, in which tensor cores sum, if with fewer
bits: scores are within 2e-6 of the exact ones. Forward needs no conversion. The gradient of the
scores is float32, that is the sum of three bfloat16 numbers of 8 bits each: these three are
multiplied side by side, in one GEMM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed.ops import fp32_gemm
from mindspeed.ops.dispatch import is_tracing
from mindspeed.ops.fp32_gemm import matmul_fp32
from mindspeed.ops.router_linear import reference

PARTS = 3
"""Of 8 bits each, the 24 bits of float32; bfloat16 has its exponents, float16 has not."""


def router_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x w^T (..., E) in float32 for x (..., H) and weight (E, H)."""
    if is_tracing() or x.dtype != torch.bfloat16 or not fp32_gemm.HAS_FP32_RESULTS:
        return reference.router_linear(x, weight)
    scores: Tensor = _RouterLinear.apply(x.reshape(-1, x.shape[-1]), weight)
    return scores.view(*x.shape[:-1], len(weight))


class _RouterLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul_fp32(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        parts = split_fp32(grad).flatten(1)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = parts @ weight.repeat(PARTS, 1)
        if ctx.needs_input_grad[1]:
            by_part = matmul_fp32(parts.t(), x).view(PARTS, *weight.shape)
            grad_weight = by_part.sum(0).to(weight.dtype)
        return grad_x, grad_weight


def split_fp32(x: Tensor) -> Tensor:
    """Return bfloat16 numbers (M, PARTS, N) that sum to the float32 numbers x (M, N)."""
    parts = x.new_empty(len(x), PARTS, x.shape[1], dtype=torch.bfloat16)
    for number in range(PARTS):
        part = parts[:, number].copy_(x)
        if number < PARTS - 1:
            x = x - part
    return parts
