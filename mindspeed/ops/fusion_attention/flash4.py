"""The package flash-attn-4, where it is installed: faster than cuDNN on Hopper.

It compiles a kernel when a kind of call first comes, which takes seconds. Its two functions are
called as torch's own registration calls them (torch.nn.attention._fa4): unlike the public one, they
write where they are told, and Megatron's layout needs no copy.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import flash_sdp_enabled

from mindspeed import device
from mindspeed.device.hopper import FLASH_ATTENTION
from mindspeed.ops.dispatch import is_watched

HEADS = (64, 128)
TOKENS = 2048  # fewer are over before it has started
LONGEST = 512  # of packed documents: shorter ones are mostly edges of its tiles
WHOLE, CAUSAL = (-1, -1), (-1, 0)


class Documents(NamedTuple):
    """Cumulative lengths (int32, on the device) and the longest of the packed documents."""

    of_q: Tensor
    of_k: Tensor
    longest_q: int
    longest_k: int


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Tensor:
    """Attend (B, N, S, H) queries to keys and values; causal only where they are as many."""
    return attention_lse(q, k, v, scale, is_causal)[0]


def attention_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend, and return the log-sum-exp (B, N, S) of the scores too, which has no gradient."""
    tokens_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = _Flash4.apply(*tokens_first, scale, is_causal, None)
    return out.transpose(1, 2), lse


def packed_attention_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, documents: Documents
) -> tuple[Tensor, Tensor]:
    """Attend packed (T, N, H) documents, each to itself; return the log-sum-exp (N, T) too.

    The last query of a document sits at its last key.
    """
    return _Flash4.apply(q, k, v, scale, is_causal, documents)


def serves(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, dropout: float) -> bool:
    """Say whether the package is here, allowed, and the fastest for this."""
    return (
        _is_usable(q, k, v, dropout)
        and q.shape[-2] >= TOKENS
        and (not is_causal or q.shape[-2] == k.shape[-2])
        and _is_proven(q.dtype, q.shape[1], k.shape[1], q.shape[-1], is_causal, False)
    )


def is_allowed(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int]) -> bool:
    """Say whether the package takes packed documents of any length, with this window."""
    return _is_usable(q, k, v, 0.0) and window in (WHOLE, CAUSAL)


def serves_packed(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], documents: Documents, dropout: float
) -> bool:
    """Say the same of packed documents and a window of (left, right) neighbours, -1 for all."""
    return (
        _is_usable(q, k, v, dropout)
        and window in (WHOLE, CAUSAL)
        and len(q) >= TOKENS
        and documents.longest_q >= LONGEST
        and _is_proven(q.dtype, q.shape[1], k.shape[1], q.shape[-1], window == CAUSAL, True)
    )


@functools.cache
def _is_proven(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, is_causal: bool, is_packed: bool
) -> bool:
    """Say whether the kernels for such heads work here; this compiles them."""
    what = f"{heads} heads ({kv_heads} of keys) of {size}, {dtype}" + ", packed" * is_packed
    sizes = heads, kv_heads, size
    return FLASH_ATTENTION.passes(
        functools.partial(_trial, dtype, sizes, is_causal, is_packed), what
    )


def _trial(
    dtype: torch.dtype, sizes: tuple[int, int, int], is_causal: bool, is_packed: bool
) -> bool:
    """Attend forth and back with equal scores: outputs are means of values."""
    heads, kv_heads, size = sizes
    shape, here = (1, 256), device.current().torch_device
    documents = None
    if is_packed:
        shape, bounds = (256,), torch.tensor([0, 256], dtype=torch.int32, device=here)
        documents = Documents(bounds, bounds, 256, 256)
    q = torch.zeros(*shape, heads, size, dtype=dtype, device=here, requires_grad=True)
    k, v = (
        torch.ones(*shape, kv_heads, size, dtype=dtype, device=here, requires_grad=True)
        for _ in range(2)
    )
    with torch.enable_grad():
        out, _ = _Flash4.apply(q, k, v, 1.0, is_causal, documents)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    # Every query hands one gradient on to the values it sees; queries and keys get none.
    total, each = heads * 256.0, grads[2].float().sum((-3, -2)).flatten()
    return (
        bool(((out - 1.0).abs() < 0.01).all())
        and all(bool((one.abs() < 0.01).all()) for one in grads[:2])
        and bool(((each - total).abs() < 0.02 * total).all())
    )


def _is_usable(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    return (
        not is_watched()
        and FLASH_ATTENTION.is_here()
        and flash_sdp_enabled()
        and not dropout
        and q.shape[-1] in HEADS
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and q.stride(-1) == 1  # the output lies as queries do, and is written by whole heads
    )


class _Flash4(torch.autograd.Function):
    """For (B, S, N, H), or (T, N, H) with documents."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        is_causal: bool,
        documents: Documents | None,
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        of_q, of_k, longest_q, longest_k = documents or (None,) * 4
        out = torch.empty_like(q)
        ctx.options = {
            "softmax_scale": scale,
            "causal": is_causal,
            "max_seqlen_q": longest_q,
            "max_seqlen_k": longest_k,
        }
        bounds = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k}
        _, lse, *_ = _flash_attn_fwd(q, k, v, out=out, return_lse=True, **bounds, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse, of_q, of_k)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        from flash_attn.cute.interface import _flash_attn_bwd

        q, k, v, out, lse, of_q, of_k = ctx.saved_tensors
        grads = _flash_attn_bwd(
            *(q, k, v, out, grad, lse),
            cu_seqlens_q=of_q,
            cu_seqlens_k=of_k,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **ctx.options,
        )
        return *grads[:3], None, None, None
