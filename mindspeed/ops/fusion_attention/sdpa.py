"""torch's attention by the backend that is fastest for the shape; no kernel of our own.

B batch, N heads, S sequence, H head size, T tokens of all documents. Keys and values may have fewer
heads than queries (GQA): no backend used here repeats them. Tensors may be strided views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    cudnn_sdp_enabled,
    flash_sdp_enabled,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mindspeed.ops.fusion_attention import flash4, kept
from mindspeed.ops.fusion_attention.flash4 import Documents

# On an H200 (torch 2.11), 2 x 32 heads x 4096 x 128 causal, bf16, forward and backward: cuDNN 2.03
# ms, flash 3.82. benchmarks/ops/attention.py measures shorter ones. torch skips backends that do
# not support a call, in this order.
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_CUDNN = SDPBackend.CUDNN_ATTENTION.value
CUDNN_MIN_TOKENS, CUDNN_HEAD_DIMS = 256, (64, 128)
HALF = (torch.bfloat16, torch.float16)
FLASH_MAX_HEAD_DIM = 256


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the attention of (B, N, S, H) tensors; `mask` is bool (True = attend) or additive."""
    options: dict[str, Any] = {
        "attn_mask": mask,
        "dropout_p": dropout,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if mask is not None or not prefers_cudnn(q, k, v):
        if mask is None and kept.is_active() and _supports_cpu_flash(q, k, v, dropout):
            return _KeptOnCpu.apply(q, k, v, scale, is_causal)
        return scaled_dot_product_attention(q, k, v, **options)
    if flash4.supports(q, k, v, is_causal, dropout):
        return flash4.attention(q, k, v, scale, is_causal)
    if _supports_deterministic(q, k, v, is_causal, dropout):
        return _deterministic_attention(q, k, v, scale, is_causal)
    if kept.is_active() and _is_cudnn(q, k, v, is_causal, dropout):
        return _KeptOnCudnn.apply(q, k, v, scale, is_causal)
    if torch.compiler.is_compiling():
        with sdpa_kernel(CUDNN_FIRST, set_priority=True):
            return scaled_dot_product_attention(q, k, v, **options)
    # What sdpa_kernel does, without its thirty microseconds, and without enabling a backend that
    # the caller has disabled.
    order = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order([_CUDNN, *(other for other in order if other != _CUDNN)])
    try:
        return scaled_dot_product_attention(q, k, v, **options)
    finally:
        torch._C._set_sdp_priority_order(order)


def prefers_cudnn(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether cuDNN is the fastest backend for a call without a mask tensor."""
    smallest, largest = CUDNN_HEAD_DIMS
    return (
        q.is_cuda
        and q.dtype in HALF
        and smallest <= q.shape[-1] <= largest
        and smallest <= v.shape[-1] <= largest
        and q.shape[-2] >= CUDNN_MIN_TOKENS
        and k.shape[-2] >= CUDNN_MIN_TOKENS
    )


def _deterministic_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool
) -> Tensor:
    """Return bitwise reproducible attention: cuDNN forward, flash attention backward.

    cuDNN's backward adds the gradient of the queries in whatever order its blocks finish; its
    forward has no such sums and is the faster one. Flash attention has a backward in a fixed order,
    which takes the output and log-sum-exp of any forward.
    """
    return _CudnnThenFlash.apply(q, k, v, scale, is_causal)


def _supports_deterministic(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, dropout: float
) -> bool:
    """Return whether determinism is required, and both kernels are enabled and support it."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
        and flash_sdp_enabled()
        and _supports_cudnn(q, k, v, is_causal, dropout)
    )


def _supports_cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, dropout: float) -> bool:
    """Return whether cuDNN's own operators, which return the log-sum-exp, take this call."""
    return (
        not torch.compiler.is_compiling()
        and cudnn_sdp_enabled()
        and not dropout
        and q.shape[-1] == v.shape[-1]
        and (not is_causal or q.shape[-2] == k.shape[-2])
    )


def _is_cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, dropout: float) -> bool:
    """Return whether torch itself would choose cuDNN, which not every device and size has."""
    if not _supports_cudnn(q, k, v, is_causal, dropout):
        return False
    is_gqa = q.shape[1] != k.shape[1]
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, is_causal, is_gqa))


def _supports_cpu_flash(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    """Return whether torch would choose its flash attention for cpus."""
    return (
        q.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and flash_sdp_enabled()
        and not dropout
        and q.shape[-1] == v.shape[-1]
        and q.shape[-2] > 0
        and all(x.stride(-1) == 1 for x in (q, k, v))
    )


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the attention of (B, N, S, H) tensors and its log-sum-exp (B, N, S)."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return found[0], found[1].reshape(q.shape[:-1])


def cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for the output and log-sum-exp of any forward."""
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of dropout
    lengths = (None, None, None, q.shape[2], k.shape[2])
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(grad, q, k, v, out, lse.unsqueeze(-1)),
        *(unused, unused, *lengths, 0.0, is_causal),
        scale=scale,
    )


class _KeptOnCudnn(torch.autograd.Function):
    """cuDNN's attention as torch calls it, with a forward that may be there already."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Tensor:
        out, lse = kept.compute_once(lambda: cudnn_forward(q, k, v, scale, is_causal))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = {"scale": scale, "is_causal": is_causal}
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *cudnn_backward(grad, *ctx.saved_tensors, **ctx.options), None, None


class _KeptOnCpu(torch.autograd.Function):
    """torch's flash attention for cpus, with a forward that may be there already."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Tensor:
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kept.compute_once(lambda: attention(q, k, v, 0.0, is_causal, scale=scale))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.is_causal = scale, is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *ctx.saved_tensors, 0.0, ctx.is_causal, scale=ctx.scale
        )
        return *grads, None, None


class _CudnnThenFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Tensor:
        out, lse = kept.compute_once(lambda: cudnn_forward(q, k, v, scale, is_causal))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.is_causal = scale, is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        # Flash attention takes (B, S, N, H).
        tensors = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        lengths = (None, None, q.shape[-2], k.shape[-2])
        grads = torch.ops.aten._flash_attention_backward(
            *tensors, lse, *lengths, 0.0, ctx.is_causal, None, None, scale=ctx.scale
        )
        return *(x.transpose(1, 2) for x in grads), None, None


def supports_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether flash attention takes these tensors, for windows and packed documents."""
    head = q.shape[-1]
    is_head = head == v.shape[-1] and head <= FLASH_MAX_HEAD_DIM and head % 8 == 0
    return q.is_cuda and q.dtype in HALF and is_head and k.shape[-2] > 0


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    dropout: float,
    window: tuple[int, int],
    documents: Documents | None = None,
) -> Tensor:
    """Return attention within a window of (left, right) keys without a mask tensor, -1 for all.

    For tensors that `supports_flash` accepts: (B, S, N, H), or packed (T, N, H) documents, each of
    which attends to itself only. The last query of a sequence is aligned to its last key.
    """
    return flash_attention_lse(
        q, k, v, scale=scale, dropout=dropout, window=window, documents=documents
    )[0]


def flash_attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    dropout: float,
    window: tuple[int, int],
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `flash_attention`, with the log-sum-exp too: (B, N, S), or packed (N, T)."""
    left, right = window
    is_causal = left < 0 and right == 0
    if documents and flash4.supports_packed(q, k, v, window, documents, dropout):
        return flash4.packed_attention_lse(q, k, v, scale, is_causal, documents)
    lengths = documents or (None, None, q.shape[1], k.shape[1])
    result = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *lengths,
        dropout,
        is_causal,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return result[0], result[1]
