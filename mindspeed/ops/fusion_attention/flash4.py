"""The package flash-attn-4, where it is installed: faster than cuDNN on Hopper.

It compiles a kernel when a kind of call first comes, which takes seconds. Its two functions are
called as torch's own registration calls them (torch.nn.attention._fa4): unlike the public one, they
write where they are told, and Megatron's layout needs no copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import flash_sdp_enabled

from mindspeed.device.hopper import FLASH_ATTENTION
from mindspeed.ops.dispatch import is_watched

HEADS = (64, 128)
TOKENS = 2048  # fewer are over before it has started


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Tensor:
    """Attend (B, N, S, H) queries to keys and values; causal only where they are as many."""
    return attention_lse(q, k, v, scale, is_causal)[0]


def attention_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend, and return the log-sum-exp (B, N, S) of the scores too, which has no gradient."""
    return _Flash4.apply(q, k, v, scale, is_causal)


def serves(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, dropout: float) -> bool:
    """Say whether the package is here, allowed, and the fastest for this."""
    return (
        not is_watched()
        and FLASH_ATTENTION.is_here()
        and flash_sdp_enabled()
        and not dropout
        and q.shape[-1] in HEADS
        and q.shape[-1] == v.shape[-1]
        and q.shape[-2] >= TOKENS
        and q.stride(-1) == 1  # the output lies as queries do, and is written by whole heads
        and (not is_causal or q.shape[-2] == k.shape[-2])
    )


class _Flash4(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        out = torch.empty_like(q)
        options = {"softmax_scale": scale, "causal": is_causal, "return_lse": True}
        _, lse, *_ = _flash_attn_fwd(*_tokens_first(q, k, v), out=out.transpose(1, 2), **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.scale, ctx.is_causal = scale, is_causal
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        from flash_attn.cute.interface import _flash_attn_bwd

        *tensors, lse = ctx.saved_tensors
        is_repeatable = torch.are_deterministic_algorithms_enabled()
        options = {"softmax_scale": ctx.scale, "causal": ctx.is_causal}
        grads = _flash_attn_bwd(
            *_tokens_first(*tensors, grad), lse, deterministic=is_repeatable, **options
        )
        return *_tokens_first(*grads[:3]), None, None


def _tokens_first(*tensors: Tensor) -> list[Tensor]:
    """Put heads behind tokens, or before them again."""
    return [x.transpose(1, 2) for x in tensors]
