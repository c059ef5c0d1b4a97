"""SwiGLU in plain torch.

y = silu(gate) * up for x = [gate | up] along `dim`, x + bias in place of x where there is a bias,
times one weight a row where there are weights. Low-precision inputs are computed in float32 and
rounded once. Only the inputs are kept for backward: silu is cheaper to recompute than to store.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def swiglu(
    x: Tensor, dim: int = -1, *, bias: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return silu(gate) * up for x = [gate | up] along `dim`.

    Args:
        x: (..., 2F) for the last dimension; any other dimension is halved likewise.
        bias: (2F,), added to x first.
        weights: (..., 1), one factor a row, as mixtures of experts use them.
    """
    return _SwiGLU.apply(x, dim % x.dim(), bias, weights)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, bias: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, bias, weights)
        ctx.dim = dim
        gate, up = _halves(x, dim, bias)
        y = torch.nn.functional.silu(gate) * up
        return (y if weights is None else y * weights).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, weights = ctx.saved_tensors
        gate, up = _halves(x, ctx.dim, bias)
        grad = grad.to(gate.dtype)
        grad_bias = grad_weights = None
        if weights is not None:
            y = torch.nn.functional.silu(gate) * up
            grad_weights = (grad * y).sum(-1, keepdim=True).to(weights.dtype)
            grad = grad * weights
        grad_x, _ = _gradient(grad, gate, up, ctx.dim)
        if bias is not None:
            grad_bias = grad_x.reshape(-1, x.shape[-1]).sum(0).to(bias.dtype)
        return grad_x.to(x.dtype), None, grad_bias, grad_weights


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up of two tensors of one shape."""
    return _SwiGLU.apply(torch.stack([gate, up]), 0, None, None).squeeze(0)


@torch.no_grad()
def swiglu_gradient(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x (..., 2F) for `grad` (..., F), and once more swiglu(x)."""
    gate, up = _halves(x, -1, None)
    grad_x, silu = _gradient(grad.to(gate.dtype), gate, up, -1)
    return grad_x.to(x.dtype), (silu * up).to(x.dtype)


@torch.no_grad()
def weighted_swiglu_gradient(
    grad: Tensor, x: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x, once more swiglu(x) * weights, and the gradient of weights.

    Args:
        grad: (..., F), of swiglu(x) * weights.
        x: (..., 2F)
        weights: (..., 1), one factor a row.
    """
    gate, up = _halves(x, -1, None)
    grad = grad.to(gate.dtype)
    grad_x, silu = _gradient(grad * weights, gate, up, -1)
    y = silu * up
    grad_weights = (grad * y).sum(-1, keepdim=True).to(weights.dtype)
    return grad_x.to(x.dtype), (y * weights).to(x.dtype), grad_weights


def _gradient(grad: Tensor, gate: Tensor, up: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of both halves, and silu(gate)."""
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat([grad_gate, grad * silu], dim=dim), silu


def _halves(x: Tensor, dim: int, bias: Tensor | None) -> tuple[Tensor, ...]:
    x_acc = x.to(torch.promote_types(x.dtype, torch.float32))
    return (x_acc if bias is None else x_acc + bias).chunk(2, dim=dim)


def check(
    x: Tensor, dim: int = -1, *, bias: Tensor | None = None, weights: Tensor | None = None
) -> None:
    """Refuse what has no two halves, and a bias or weights of another shape."""
    if not x.is_floating_point():
        raise ValueError(f"swiglu needs floating-point numbers, got {x.dtype}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"swiglu got dim {dim} for x of {x.dim()} dimensions")
    if x.shape[dim] % 2:
        raise ValueError(f"swiglu splits dimension {dim} in two halves, got size {x.shape[dim]}")
    if (bias is not None or weights is not None) and dim % x.dim() != x.dim() - 1:
        raise ValueError(f"swiglu takes bias and weights with the last dimension only, got {dim}")
    for name, given, shape in (
        ("bias", bias, x.shape[-1:]),
        ("weights", weights, (*x.shape[:-1], 1)),
    ):
        if given is not None and given.shape != shape:
            raise ValueError(
                f"swiglu needs {name} of shape {tuple(shape)} for x of shape {tuple(x.shape)}, "
                f"got {tuple(given.shape)}"
            )


def check_two(gate: Tensor, up: Tensor) -> None:
    """Refuse two tensors that do not belong together."""
    if not gate.is_floating_point():
        raise ValueError(f"silu_mul needs floating-point numbers, got {gate.dtype}")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"silu_mul needs gate and up of one shape and type, got {tuple(gate.shape)} "
            f"{gate.dtype} and {tuple(up.shape)} {up.dtype}"
        )
