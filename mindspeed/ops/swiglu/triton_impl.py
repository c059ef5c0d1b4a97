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

# Eight bfloat16 per thread are one 16-byte load; programs of four warps allow many of them on a
# multiprocessor, which hides the memory latency of such simple code.
BLOCK_N, NUM_WARPS = 1024, 4


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
    """Return the gradient of x and recompute swiglu(x), reading x once."""
    if x.dtype == torch.float64:
        return reference.swiglu_gradient(grad, x)
    x = x.contiguous()
    grad_x, y = torch.empty_like(x), x.new_empty(grad.shape)
    _launch_backward(grad, _packed(x, -1), _packed(grad_x, -1), y=y)
    return grad_x, y


def weighted_swiglu_gradient(
    grad: Tensor, x: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and weights, and recompute swiglu(x) * weights, reading x once."""
    if x.dtype == torch.float64:
        return reference.weighted_swiglu_gradient(grad, x, weights)
    x = x.contiguous()
    grad_x, y, grad_weights = torch.empty_like(x), x.new_empty(grad.shape), weights.clone()
    _launch_backward(
        *(grad, _packed(x, -1), _packed(grad_x, -1)),
        weights=weights,
        grad_weights=grad_weights,
        y=y,
    )
    return grad_x, y, grad_weights


class _Halves(NamedTuple):
    """Gate and up as contiguous rows: `rows` of `size` elements, `stride` from one to the next.

    Without `up` it follows each row of the gate: a compiler does not handle two views of one memory
    that a kernel writes.
    """

    gate: Tensor
    up: Tensor | None
    rows: int
    size: int
    stride: int


def _packed(x: Tensor, dim: int) -> _Halves:
    """Return both halves of a contiguous tensor: along any dimension their rows are contiguous."""
    dim %= x.dim()
    size = math.prod(x.shape[dim:]) // 2
    return _Halves(x, None, math.prod(x.shape[:dim]), size, 2 * size)


def _separate(gate: Tensor, up: Tensor) -> _Halves:
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
        _launch_forward(_separate(gate, up), y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _launch_backward(grad, _separate(gate, up), _separate(grad_gate, grad_up))
        return grad_gate, grad_up


def _launch_forward(
    halves: _Halves, y: Tensor, bias: Tensor | None = None, weights: Tensor | None = None
) -> None:
    gate, up, rows, size, stride = halves
    blocks = triton.cdiv(size, BLOCK_N)
    bias, weights = _contiguous(bias), _contiguous(weights)
    if y.numel():
        sizes = size, stride, blocks
        launch(
            *(_swiglu_forward, (rows * blocks,), gate, up, bias, weights, y, *sizes),
            BLOCK_N=BLOCK_N,
            num_warps=NUM_WARPS,
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
    blocks = triton.cdiv(size, BLOCK_N)
    # The gradient of a row's weight is a sum over the row, so one program handles all of it.
    steps = 1 if weights is None else blocks
    if grad.numel():
        inputs = grad.contiguous(), gate, up, _contiguous(bias), _contiguous(weights)
        outputs = grads.gate, grads.up, grad_weights, y
        sizes = size, stride, blocks // steps
        launch(
            *(_swiglu_backward, (rows * blocks // steps,), *inputs, *outputs, *sizes),
            NUM_STEPS=steps,
            BLOCK_N=BLOCK_N,
            num_warps=NUM_WARPS,
        )


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@triton.jit
def _up_ptr(gate_ptr, up_ptr, N):
    return gate_ptr + N if up_ptr is None else up_ptr


@triton.jit
def _load_halves(gate_ptr, up_ptr, bias_ptr, row_offset, offs_n, mask, N):
    gate = tl.load(gate_ptr + row_offset + offs_n, mask=mask, other=0.0).to(tl.float32)
    up_ptrs = _up_ptr(gate_ptr, up_ptr, N) + row_offset + offs_n
    up = tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + offs_n, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + N + offs_n, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _swiglu_forward(
    gate_ptr, up_ptr, bias_ptr, weights_ptr, y_ptr, N, stride_m, blocks_n, BLOCK_N: tl.constexpr
):
    row = (tl.program_id(0) // blocks_n).to(tl.int64)
    offs_n = (tl.program_id(0) % blocks_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    gate, up = _load_halves(gate_ptr, up_ptr, bias_ptr, row * stride_m, offs_n, mask, N)
    y = gate * tl.sigmoid(gate) * up
    if weights_ptr is not None:
        y *= tl.load(weights_ptr + row).to(tl.float32)
    tl.store(y_ptr + row * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(
    dy_ptr,
    gate_ptr,
    up_ptr,
    bias_ptr,
    weights_ptr,
    dgate_ptr,
    dup_ptr,
    dweights_ptr,
    y_ptr,
    N,
    stride_m,
    blocks_n,
    NUM_STEPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = (tl.program_id(0) // blocks_n).to(tl.int64)
    start = (tl.program_id(0) % blocks_n).to(tl.int64) * BLOCK_N
    row_offset = row * stride_m
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for step in range(NUM_STEPS):
        offs_n = start + step * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        gate, up = _load_halves(gate_ptr, up_ptr, bias_ptr, row_offset, offs_n, mask, N)
        dy = tl.load(dy_ptr + row * N + offs_n, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if weights_ptr is not None:
            acc += dy * silu * up
            dy *= tl.load(weights_ptr + row).to(tl.float32)
        dgate = dy * up * (sigmoid + silu * (1 - sigmoid))
        dtype = dgate_ptr.dtype.element_ty
        tl.store(dgate_ptr + row_offset + offs_n, dgate.to(dtype), mask=mask)
        dup_ptrs = _up_ptr(dgate_ptr, dup_ptr, N) + row_offset + offs_n
        tl.store(dup_ptrs, (dy * silu).to(dtype), mask=mask)
        if y_ptr is not None:
            y = silu * up
            if weights_ptr is not None:
                y *= tl.load(weights_ptr + row).to(tl.float32)
            tl.store(y_ptr + row * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask)
    if weights_ptr is not None:
        tl.store(dweights_ptr + row, tl.sum(acc).to(dweights_ptr.dtype.element_ty))
