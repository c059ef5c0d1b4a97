"""The logarithm of the sum of exponentials: one kernel each way, which reads a row once.

Backward keeps the rows and their results: the gradient is grad exp(x - result).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed.ops.launch import launch
from mindspeed.ops.row_logsumexp import reference

_TILE = 2048  # numbers of a program: 16 for each thread of four warps
_MAX_COLUMNS = 16384


def row_logsumexp(x: Tensor) -> Tensor:
    """Return log(sum(exp(x))) over the columns of (T, E), in float32."""
    if x.dtype == torch.float64 or x.shape[1] > _MAX_COLUMNS:
        return reference.row_logsumexp(x)
    result: Tensor = _RowLogSumExp.apply(x)
    return result


class _RowLogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(len(x), dtype=torch.float32)
        if len(x):
            grid, sizes = _grid(x)
            launch(_forward, grid, x, out, *x.shape, **sizes)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        if len(x):
            grid, sizes = _grid(x)
            launch(_backward, grid, x, out, grad, grad.stride(0), grad_x, *x.shape, **sizes)
        return grad_x


def _grid(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    block_e = triton.next_power_of_2(x.shape[1])
    block_t = max(1, _TILE // block_e)
    return (triton.cdiv(len(x), block_t),), {"BLOCK_T": block_t, "BLOCK_E": block_e}


@triton.jit
def _forward(x_ptr, out_ptr, T, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)
    mask = (offs_t < T)[:, None] & (offs_e < E)[None, :]
    x = tl.load(x_ptr + offs_t[:, None] * E + offs_e[None, :], mask=mask, other=-float("inf"))
    x = tl.where((offs_t < T)[:, None], x.to(tl.float32), 0.0)
    highest = tl.max(x, axis=1)
    # Rows of minus infinity, or with infinity, would become NaN by the difference.
    shift = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    total = tl.sum(tl.exp(x - shift[:, None]), axis=1)
    tl.store(out_ptr + offs_t, tl.log(total) + shift, mask=offs_t < T)


@triton.jit
def _backward(
    x_ptr,
    out_ptr,
    grad_ptr,
    stride_g,
    grad_x_ptr,
    T,
    E,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)
    mask_t = offs_t < T
    mask = mask_t[:, None] & (offs_e < E)[None, :]
    offs = offs_t[:, None] * E + offs_e[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + offs_t, mask=mask_t, other=0.0)
    grad = tl.load(grad_ptr + offs_t * stride_g, mask=mask_t, other=0.0).to(tl.float32)
    grad_x = grad[:, None] * tl.exp(x - out[:, None])
    tl.store(grad_x_ptr + offs, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
