"""SwiGLU in Triton: one kernel each way, each element read and written once."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up of two tensors."""
    if gate.dtype == torch.float64:
        return reference.silu_mul(gate, up)
    return _SiluMul.apply(gate.contiguous(), up.contiguous())


def swiglu_gradient(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x and once more swiglu(x), in one reading of x."""
    if x.dtype == torch.float64:
        return reference.swiglu_gradient(grad, x)
    x = x.contiguous()
    grad_x, y = torch.empty_like(x), x.new_empty(grad.shape)
    _launch_backward(grad, _packed(x, -1), _packed(grad_x, -1), y=y)
    return grad_x, y


class _Halves(NamedTuple):
    """Gate and up as runs in memory: `rows` of `size` elements, `stride` from one to the next.

    Without `up` it lies behind each row of the gate: a compiler does not see through two views of
    one memory that a kernel writes.
    """

    gate: Tensor
    up: Tensor | None
    rows: int
    size: int
    stride: int


def _packed(x: Tensor, dim: int) -> _Halves:
    """Find both halves of a contiguous tensor: along any dimension they are contiguous runs."""
    dim %= x.dim()
    size = math.prod(x.shape[dim:]) // 2
    return _Halves(x, None, math.prod(x.shape[:dim]), size, 2 * size)


def _apart(gate: Tensor, up: Tensor) -> _Halves:
    return _Halves(gate, up, 1, gate.numel(), gate.numel())


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, bias: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, bias, weights)
        ctx.dim = dim
        y = x.new_empty((*x.shape[:dim], x.shape[dim] // 2, *x.shape[dim + 1 :]))
        _launch_forward(_packed(x, dim), y, bias, weights)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, weights = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weights = None if weights is None else weights.new_empty(weights.shape)
        _launch_backward(
            grad,
            _packed(x, ctx.dim),
            _packed(grad_x, ctx.dim),
            bias=bias,
            weights=weights,
            grad_weights=grad_weights,
        )
        grad_bias = None
        if bias is not None:
            grad_bias = grad_x.reshape(-1, x.shape[-1]).sum(0, dtype=torch.float32).to(bias.dtype)
        return grad_x, None, grad_bias, grad_weights


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y = torch.empty_like(gate)
        _launch_forward(_apart(gate, up), y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _launch_backward(grad, _apart(gate, up), _apart(grad_gate, grad_up))
        return grad_gate, grad_up


def _launch_forward(
    halves: _Halves, y: Tensor, bias: Tensor | None = None, weights: Tensor | None = None
) -> None:
    gate, up, rows, size, stride = halves
    blocks = triton.cdiv(size, BLOCK)
    bias, weights = _contiguous(bias), _contiguous(weights)
    if y.numel():
        sizes = size, stride, blocks
        launch(
            *(_forward, (rows * blocks,), gate, up, bias, weights, y, *sizes),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def _launch_backward(
    grad: Tensor,
    halves: _Halves,
    grads: _Halves,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    grad_weights: Tensor | None = None,
    y: Tensor | None = None,
) -> None:
    gate, up, rows, size, stride = halves
    blocks = triton.cdiv(size, BLOCK)
    # The gradient of a row's weight is a sum over the row, so one program walks it all.
    steps = 1 if weights is None else blocks
    if grad.numel():
        inputs = grad.contiguous(), gate, up, _contiguous(bias), _contiguous(weights)
        outputs = grads.gate, grads.up, grad_weights, y
        sizes = size, stride, blocks // steps
        launch(
            *(_backward, (rows * blocks // steps,), *inputs, *outputs, *sizes),
            STEPS=steps,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@triton.jit
def _behind(gate, up, half):
    return gate + half if up is None else up


@triton.jit
def _load_halves(gate, up, bias, base, columns, mask, half):
    left = tl.load(gate + base + columns, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(_behind(gate, up, half) + base + columns, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        left += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
        right += tl.load(bias + half + columns, mask=mask, other=0.0).to(tl.float32)
    return left, right


@triton.jit
def _forward(gate, up, bias, weights, y, half, stride, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < half
    left, right = _load_halves(gate, up, bias, row * stride, columns, mask, half)
    value = left * tl.sigmoid(left) * right
    if weights is not None:
        value *= tl.load(weights + row).to(tl.float32)
    tl.store(y + row * half + columns, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad,
    gate,
    up,
    bias,
    weights,
    grad_gate,
    grad_up,
    grad_weights,
    y,
    half,
    stride,
    blocks,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    base = row * stride
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(STEPS):
        columns = start + step * BLOCK + tl.arange(0, BLOCK)
        mask = columns < half
        left, right = _load_halves(gate, up, bias, base, columns, mask, half)
        g = tl.load(grad + row * half + columns, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(left)
        silu = left * sigmoid
        if weights is not None:
            total += g * silu * right
            g *= tl.load(weights + row).to(tl.float32)
        slope = g * right * (sigmoid + silu * (1 - sigmoid))
        kind = grad_gate.dtype.element_ty
        tl.store(grad_gate + base + columns, slope.to(kind), mask=mask)
        tl.store(_behind(grad_gate, grad_up, half) + base + columns, (g * silu).to(kind), mask=mask)
        if y is not None:
            value = (silu * right).to(y.dtype.element_ty)
            tl.store(y + row * half + columns, value, mask=mask)
    if weights is not None:
        tl.store(grad_weights + row, tl.sum(total).to(grad_weights.dtype.element_ty))
