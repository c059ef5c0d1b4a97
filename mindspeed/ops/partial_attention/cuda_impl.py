"""partial_attention on CUDA by flash kernels in half precision; the reference for the rest.

FlashAttention-4 where it is installed, cuDNN for long parts without a mask or with a square causal
one, torch's flash attention for windows, packed documents and deterministic gradients. All of them
take the output and log-sum-exp of any forward. Values with smaller heads than keys (MLA) are padded
with zeros, which change no number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mindspeed.ops.fusion_attention import flash4, sdpa
from mindspeed.ops.fusion_attention.flash4 import CAUSAL, FULL, Documents
from mindspeed.ops.partial_attention import reference
from mindspeed.ops.partial_attention.reference import Gradients, Window


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: Window = (-1, -1),
    bias: Tensor | None = None,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention (B, S, N, V) of (B, S or T, heads, size) tensors, and its lse."""
    if not _is_flash(q, k, v, bias):
        return reference.partial_attention(
            q, k, v, scale=scale, window=window, bias=bias, documents=documents
        )
    size = v.shape[-1]
    if size != q.shape[-1]:
        out, lse = partial_attention(
            q, k, _padded(v, q), scale=scale, window=window, documents=documents
        )
        return out[..., :size], lse
    if _is_flash4(q, k, v, window, documents):
        return flash4.forward(q, k, v, scale, window == CAUSAL, documents)
    if _is_cudnn(q, k, v, window, documents):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = sdpa.cudnn_forward(q, k, v, scale, window == CAUSAL)
        return out.transpose(1, 2), lse
    found = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *(documents or (None, None, q.shape[1], k.shape[1])),
        0.0,
        window == CAUSAL,
        False,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return found[0], found[1]


def partial_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: Window = (-1, -1),
    bias: Tensor | None = None,
    documents: Documents | None = None,
) -> Gradients:
    """Return the gradients of q, k, v and, with a bias, of the bias, for these keys."""
    if not _is_flash(q, k, v, bias):
        return reference.partial_attention_backward(
            *(grad, q, k, v, out, lse), scale=scale, window=window, bias=bias, documents=documents
        )
    size = v.shape[-1]
    if size != q.shape[-1]:
        grad, wide, out = (_padded(x, q) for x in (grad, v, out))
        dq, dk, dv, _ = partial_attention_backward(
            *(grad, q, k, wide, out, lse), scale=scale, window=window, documents=documents
        )
        return dq, dk, dv[..., :size], None
    lse = lse.contiguous()
    if _is_flash4(q, k, v, window, documents):
        dq, dk, dv = flash4.backward(
            *(grad, q, k, v, out, lse),
            scale=scale,
            is_causal=window == CAUSAL,
            documents=documents,
        )
        return dq, dk, dv, None
    if _is_cudnn(q, k, v, window, documents):
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        is_causal = window == CAUSAL
        grads = sdpa.cudnn_backward(grad, q, k, v, out, lse, scale=scale, is_causal=is_causal)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv, None
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(x.contiguous() for x in (grad, q, k, v, out)),
        lse,
        *(documents or (None, None, q.shape[1], k.shape[1])),
        0.0,
        window == CAUSAL,
        None,
        None,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    return dq, dk, dv, None


def _padded(x: Tensor, like: Tensor) -> Tensor:
    return pad(x, (0, like.shape[-1] - x.shape[-1]))


def _is_flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    rows = q.shape[:-2].numel() and k.shape[:-2].numel()  # a kernel needs a query and a key
    is_head = v.shape[-1] <= q.shape[-1] <= sdpa.FLASH_MAX_HEAD_DIM and q.shape[-1] % 8 == 0
    return bias is None and q.dtype in sdpa.HALF and bool(rows) and is_head


def _is_flash4(
    q: Tensor, k: Tensor, v: Tensor, window: Window, documents: Documents | None
) -> bool:
    if documents is not None:
        return flash4.supports_packed(q, k, v, window, documents, 0.0)
    return window in (FULL, CAUSAL) and flash4.supports_lengths(q, k, v, window == CAUSAL)


def _is_cudnn(q: Tensor, k: Tensor, v: Tensor, window: Window, documents: Documents | None) -> bool:
    is_square = q.shape[1] == k.shape[1]  # cuDNN aligns the first query to the first key
    is_plain = window == FULL or (window == CAUSAL and is_square)
    return (
        documents is None
        and is_plain
        and sdpa.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and sdpa.prefers_cudnn(*(x.transpose(1, 2) for x in (q, k, v)))
    )
