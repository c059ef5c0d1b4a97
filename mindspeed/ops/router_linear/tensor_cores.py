"""The scores of a router on tensor cores, several times as fast as GEMMs of float32.

The product of two bfloat16 numbers is exact in float32, in which tensor cores sum, if with fewer
bits: scores are within 2e-6 of the exact ones. Forward needs no conversion. The gradient of the
scores is float32, that is the sum of three bfloat16 numbers of 8 bits each: these three are
multiplied side by side, in one GEMM.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed.ops import fp32_gemm
from mindspeed.ops.dispatch import is_tracing
from mindspeed.ops.fp32_gemm import matmul_fp32
from mindspeed.ops.launch import launch
from mindspeed.ops.router_linear import reference

PARTS = 3
"""Of 8 bits each, the 24 bits of float32; bfloat16 has its exponents, float16 has not."""
_TILE = 2048  # numbers of a program: 16 of each thread


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
    x = x.contiguous()
    num_rows, width = x.shape
    parts = x.new_empty(num_rows, PARTS, width, dtype=torch.bfloat16)
    if x.numel():
        block_n = triton.next_power_of_2(width)
        block_m = max(_TILE // block_n, 1)
        grid = (triton.cdiv(num_rows, block_m),)
        constants = {"NUM_PARTS": PARTS, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 4}
        launch(_split, grid, x, parts, num_rows, width, **constants)
    return parts


@triton.jit
def _split(
    x_ptr,
    parts_ptr,
    M,
    N,
    NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    rest = tl.load(x_ptr + offs_m * N + offs_n, mask=mask, other=0.0)
    for number in tl.static_range(NUM_PARTS):
        part = rest.to(tl.bfloat16)
        tl.store(parts_ptr + (offs_m * NUM_PARTS + number) * N + offs_n, part, mask=mask)
        rest -= part.to(tl.float32)
