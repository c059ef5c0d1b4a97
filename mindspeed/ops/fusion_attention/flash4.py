"""FlashAttention-4 (the package flash-attn-4), where it is installed: faster than cuDNN on Hopper.

It compiles a kernel at the first call of each kind, which takes seconds. Its two functions are
called as torch's own registration calls them (torch.nn.attention._fa4): unlike the public one, they
take an output tensor, so Megatron's layout needs no copy.
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
from mindspeed.device.precompile import Kernel
from mindspeed.ops.dispatch import is_tracing
from mindspeed.ops.fusion_attention.kept import compute_once, suspended

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
MIN_TOKENS = 2048  # with fewer, the launch takes longer than the kernel
MIN_DOCUMENT = 512  # longest packed document: shorter ones are mostly partial tiles
FULL, CAUSAL = (-1, -1), (-1, 0)
TRIAL_TOKENS = 256


class Documents(NamedTuple):
    """Cumulative lengths (int32, on the device) and maximum lengths of packed documents."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Tensor:
    """Return the attention of (B, N, S, H) tensors; causal only with as many queries as keys."""
    return attention_lse(q, k, v, scale, is_causal)[0]


def attention_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the attention and the log-sum-exp (B, N, S) of the scores, which has no gradient."""
    tokens_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = _Flash4.apply(*tokens_first, scale, is_causal, None)
    return out.transpose(1, 2), lse


def packed_attention_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, documents: Documents
) -> tuple[Tensor, Tensor]:
    """Return the attention of packed (T, N, H) documents and the log-sum-exp (N, T).

    The last query of a document is aligned to its last key.
    """
    return _Flash4.apply(q, k, v, scale, is_causal, documents)


def supports(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, dropout: float) -> bool:
    """Return whether the package is installed, enabled, and the fastest for this call."""
    return (
        _is_usable(q, k, v, dropout)
        and q.shape[-2] >= MIN_TOKENS
        and (not is_causal or q.shape[-2] == k.shape[-2])
        and _passes_trial(q.dtype, q.shape[1], k.shape[1], q.shape[-1], is_causal, False)
    )


def supports_lengths(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Like supports, for (B, S, N, H) tensors with the last query aligned to the last key."""
    return (
        _is_usable(q, k, v, 0.0)
        and min(q.shape[1], k.shape[1]) >= MIN_TOKENS
        and _passes_trial(q.dtype, q.shape[2], k.shape[2], q.shape[-1], is_causal, False)
    )


def is_allowed(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int]) -> bool:
    """Return whether the package takes packed documents of any length, with this window."""
    return _is_usable(q, k, v, 0.0) and window in (FULL, CAUSAL)


def supports_packed(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int], documents: Documents, dropout: float
) -> bool:
    """Like supports, for packed documents and a window of (left, right) keys, -1 for all."""
    return (
        _is_usable(q, k, v, dropout)
        and window in (FULL, CAUSAL)
        and len(q) >= MIN_TOKENS
        and documents.max_seqlen_q >= MIN_DOCUMENT
        and _passes_trial(q.dtype, q.shape[1], k.shape[1], q.shape[-1], window == CAUSAL, True)
    )


class _Heads(NamedTuple):
    """What kernels are compiled for."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    is_causal: bool
    is_packed: bool

    def __str__(self) -> str:
        sizes = f"{self.heads} heads ({self.kv_heads} of keys) of {self.size}"
        return f"{sizes}, {self.dtype}" + ", packed" * self.is_packed

    def kernels(self) -> list[Kernel]:
        """Return forward and backward, in the deterministic mode of this moment."""
        name = str(self.dtype).removeprefix("torch.")
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        return [
            Kernel(run_kernel, (False, False, name, *self[1:])),
            Kernel(run_kernel, (True, is_deterministic, name, *self[1:])),
        ]

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Documents | None]:
        """Return zeros as queries, ones as keys and values, all of one document if packed."""
        shape: tuple[int, ...] = (1, TRIAL_TOKENS)
        here, documents = device.current().torch_device, None
        if self.is_packed:
            shape = (TRIAL_TOKENS,)
            bounds = torch.tensor([0, TRIAL_TOKENS], dtype=torch.int32, device=here)
            documents = Documents(bounds, bounds, TRIAL_TOKENS, TRIAL_TOKENS)
        q = torch.zeros(*shape, self.heads, self.size, dtype=self.dtype, device=here)
        k, v = (
            torch.ones(*shape, self.kv_heads, self.size, dtype=self.dtype, device=here)
            for _ in range(2)
        )
        return q, k, v, documents


@functools.cache  # every layer asks
def prepare(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, *, is_packed: bool = False
) -> None:
    """Start to compile the kernels of a causal layer that is built, which will ask for them."""
    if dtype in DTYPES and size in HEAD_DIMS and FLASH_ATTENTION.is_here() and flash_sdp_enabled():
        which = _Heads(dtype, heads, kv_heads, size, is_causal=True, is_packed=is_packed)
        FLASH_ATTENTION.prepare(which.kernels(), str(which))


def run_kernel(is_backward: bool, is_deterministic: bool, dtype: str, *sizes: Any) -> None:
    """Run the kernels of one direction, in a process that compiles them."""
    which = _Heads(getattr(torch, dtype), *sizes)
    torch.use_deterministic_algorithms(is_deterministic)
    q, k, v, documents = which.draw()
    if not is_backward:
        forward(q, k, v, 1.0, which.is_causal, documents)
        return
    counts = torch.full((TRIAL_TOKENS,), float(TRIAL_TOKENS), device=q.device)
    counts = torch.ones_like(counts).cumsum(0) if which.is_causal else counts
    lse = counts.log().expand(*q.shape[:-3], which.heads, -1).contiguous()
    out, is_causal = torch.ones_like(q), which.is_causal
    backward(out, q, k, v, out, lse, scale=1.0, is_causal=is_causal, documents=documents)


@functools.cache
def _passes_trial(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, is_causal: bool, is_packed: bool
) -> bool:
    """Return whether the kernels for such heads work on this device; this compiles them."""
    which = _Heads(dtype, heads, kv_heads, size, is_causal, is_packed)
    trial = functools.partial(_trial, which)
    return FLASH_ATTENTION.passes(trial, str(which), which.kernels())


def _trial(which: _Heads) -> bool:
    """Run forward and backward with equal scores: outputs are means of values."""
    *inputs, documents = which.draw()
    q, k, v = (x.requires_grad_() for x in inputs)
    with torch.enable_grad(), suspended():  # a layer that is recomputed may be the first to ask
        out, _ = _Flash4.apply(q, k, v, 1.0, which.is_causal, documents)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    # Every query passes one gradient on to the values it attends to; queries and keys get none.
    total, each = which.heads * float(TRIAL_TOKENS), grads[2].float().sum((-3, -2)).flatten()
    return (
        bool(((out - 1.0).abs() < 0.01).all())
        and all(bool((one.abs() < 0.01).all()) for one in grads[:2])
        and bool(((each - total).abs() < 0.02 * total).all())
    )


def _is_usable(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    return (
        not is_tracing()
        and FLASH_ATTENTION.is_here()
        and flash_sdp_enabled()
        and not dropout
        and q.shape[-1] in HEAD_DIMS
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and q.stride(-1) == 1  # the output has its strides and is written by whole heads
    )


class _Flash4(torch.autograd.Function):
    """Attention of (B, S, N, H), or of (T, N, H) with documents."""

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
        out, lse = compute_once(lambda: forward(q, k, v, scale, is_causal, documents))
        bounds = documents[:2] if documents else (None, None)
        ctx.options = {"scale": scale, "is_causal": is_causal}
        ctx.longest = documents and documents[2:]
        ctx.save_for_backward(q, k, v, out, lse, *bounds)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *bounds = ctx.saved_tensors
        documents = ctx.longest and Documents(*bounds, *ctx.longest)
        grads = backward(grad, q, k, v, out, lse, documents=documents, **ctx.options)
        return *grads, None, None, None


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, documents: Documents | None
) -> tuple[Tensor, Tensor]:
    """Return the attention of (B, S, N, H), or of (T, N, H) with documents, and its log-sum-exp.

    The last query is aligned to the last key.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    out, options = torch.empty_like(q), _options(scale, is_causal, documents)
    _, lse, *_ = _flash_attn_fwd(q, k, v, out=out, return_lse=True, **options)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    is_causal: bool,
    documents: Documents | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for the output and log-sum-exp of any forward."""
    from flash_attn.cute.interface import _flash_attn_bwd

    options = _options(scale, is_causal, documents)
    grads = _flash_attn_bwd(
        *(q, k, v, out, grad, lse),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **options,
    )
    return grads[0], grads[1], grads[2]


def _options(scale: float, is_causal: bool, documents: Documents | None) -> dict[str, Any]:
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = documents or (None,) * 4
    return {
        "softmax_scale": scale,
        "causal": is_causal,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
