"""SwiGLU in plain torch.

y = silu(gate) * up, where x (..., 2F) = [gate | up] and y is (..., F). Low-precision inputs are
computed in float32 and rounded once. Only x is kept for backward: silu is cheaper to recompute than
to store.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up for x = [gate | up] along the last dimension."""
    if x.shape[-1] % 2:
        raise ValueError(f"swiglu splits the last dimension in two halves, got size {x.shape[-1]}")
    return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = _halves(x)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = _halves(x)
        grad = grad.to(gate.dtype)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
        return torch.cat([grad_gate, grad * silu], dim=-1).to(x.dtype)


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
