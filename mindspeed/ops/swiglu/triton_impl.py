"""SwiGLU in Triton: one kernel each way, each element read and written once."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed.ops.launch import launch
from mindspeed.ops.swiglu import reference

# Eight bfloat16 a thread are one 16-byte load; a block of four warps leaves room for many blocks on
# a multiprocessor, which is what hides the latency of memory in code this simple.
BLOCK, WARPS = 1024, 4


def swiglu(
    x: Tensor, dim: int = -1, *, bias: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return silu(gate) * up for x = [gate | up] along `dim`."""
    if x.dtype == torch.float64:
        return reference.swiglu(x, dim, bias=bias, weights=weights)
    return _SwiGLU.apply(x.contiguous(), dim % x.dim(), bias, weights)


def swiglu_gradient(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x and once more swiglu(x), in one reading of x."""
    if x.dtype == torch.float64:
        return reference.swiglu_gradient(grad, x)
    x = x.contiguous()
    grad_x, y = torch.empty_like(x), x.new_empty(grad.shape)
    _launch_backward(grad, x, -1, grad_x=grad_x, y=y)
    return grad_x, y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, bias: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, bias, weights)
        ctx.dim = dim
        y = x.new_empty((*x.shape[:dim], x.shape[dim] // 2, *x.shape[dim + 1 :]))
        rows, half = _rows(x, dim)
        blocks = triton.cdiv(half, BLOCK)
        if y.numel():
            bias, weights = _contiguous(bias), _contiguous(weights)
            launch(
                _forward,
                (rows * blocks,),
                x,
                bias,
                weights,
                y,
                half,
                blocks,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, weights = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weights = None if weights is None else weights.new_empty(weights.shape)
        _launch_backward(
            grad,
            x,
            ctx.dim,
            bias=_contiguous(bias),
            weights=_contiguous(weights),
            grad_x=grad_x,
            grad_weights=grad_weights,
        )
        grad_bias = None
        if bias is not None:
            grad_bias = grad_x.reshape(-1, x.shape[-1]).sum(0, dtype=torch.float32).to(bias.dtype)
        return grad_x, None, grad_bias, grad_weights


def _launch_backward(
    grad: Tensor,
    x: Tensor,
    dim: int,
    *,
    grad_x: Tensor,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    grad_weights: Tensor | None = None,
    y: Tensor | None = None,
) -> None:
    rows, half = _rows(x, dim % x.dim())
    blocks = triton.cdiv(half, BLOCK)
    # The gradient of a row's weight is a sum over the row, so one program walks it all.
    steps = 1 if weights is None else blocks
    if x.numel():
        launch(
            _backward,
            (rows * blocks // steps,),
            grad.contiguous(),
            x,
            bias,
            weights,
            grad_x,
            grad_weights,
            y,
            half,
            blocks // steps,
            STEPS=steps,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def _rows(x: Tensor, dim: int) -> tuple[int, int]:
    """Count the runs of memory that hold one gate half and one up half, and a half's elements.

    In a contiguous tensor the halves of any dimension are contiguous runs: no dimension is moved.
    """
    return math.prod(x.shape[:dim]), math.prod(x.shape[dim:]) // 2


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@triton.jit
def _load_halves(x, bias, base, columns, mask, half):
    gate = tl.load(x + base + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + base + half + columns, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        gate += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias + half + columns, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _forward(x, bias, weights, y, half, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < half
    gate, up = _load_halves(x, bias, row * 2 * half, columns, mask, half)
    value = gate * tl.sigmoid(gate) * up
    if weights is not None:
        value *= tl.load(weights + row).to(tl.float32)
    tl.store(y + row * half + columns, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad,
    x,
    bias,
    weights,
    grad_x,
    grad_weights,
    y,
    half,
    blocks,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    base = row * 2 * half
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        columns = start + step * BLOCK + tl.arange(0, BLOCK)
        mask = columns < half
        gate, up = _load_halves(x, bias, base, columns, mask, half)
        g = tl.load(grad + row * half + columns, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if weights is not None:
            total += g * silu * up
            g *= tl.load(weights + row).to(tl.float32)
        grad_gate = g * up * (sigmoid + silu * (1 - sigmoid))
        place = grad_x + base + columns
        tl.store(place, grad_gate.to(grad_x.dtype.element_ty), mask=mask)
        tl.store(place + half, (g * silu).to(grad_x.dtype.element_ty), mask=mask)
        if y is not None:
            value = (silu * up).to(y.dtype.element_ty)
            tl.store(y + row * half + columns, value, mask=mask)
    if weights is not None:
        tl.store(grad_weights + row, tl.sum(total).to(grad_weights.dtype.element_ty))
