"""Attention that gives the same bits in every run: cuDNN forward, flash attention backward.

cuDNN's backward adds the gradient of the queries in whatever order its blocks finish; its forward
has no such sums and is the faster one. Flash attention has a backward in a fixed order, which wants
the output and the log-sum-exp of each query, whoever computed them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import cudnn_sdp_enabled, flash_sdp_enabled


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Tensor:
    """Attend (B, N, S, H) queries to keys and values; causal only where they are as many."""
    return _CudnnThenFlash.apply(q, k, v, scale, is_causal)


def serves(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, dropout: float) -> bool:
    """Say whether the same bits are wanted, and both kernels are allowed and compute this."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
        and not torch.compiler.is_compiling()
        and cudnn_sdp_enabled()
        and flash_sdp_enabled()
        and not dropout
        and q.shape[-1] == v.shape[-1]
        and (not is_causal or q.shape[-2] == k.shape[-2])
    )


class _CudnnThenFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Tensor:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, is_causal, False, scale=scale
        )
        out, lse = found[0], found[1].reshape(q.shape[:-1])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.is_causal = scale, is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        # Flash attention wants heads behind tokens.
        tensors = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        lengths = (None, None, q.shape[-2], k.shape[-2])
        grads = torch.ops.aten._flash_attention_backward(
            *tensors, lse, *lengths, 0.0, ctx.is_causal, None, None, scale=ctx.scale
        )
        return *(x.transpose(1, 2) for x in grads), None, None
