"""torch's attention by the backend that is fastest for the shape; no kernel of our own.

B batch, N heads, S sequence, H head size, T tokens of all documents. Keys and values may have fewer
heads than queries: no backend used here repeats them. Tensors come as strided views.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mindspeed.ops.fusion_attention import flash4, repeatable
from mindspeed.ops.fusion_attention.flash4 import Documents

# On an H200 (torch 2.11), 2 x 32 heads x 4096 x 128 causal, bf16, forward and backward: cuDNN 2.03
# ms, flash 3.82. benchmarks/ops/attention.py races shorter ones. torch passes over what does not
# serve a call, in this order.
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_CUDNN = int(SDPBackend.CUDNN_ATTENTION)
CUDNN_TOKENS, CUDNN_HEADS = 256, (64, 128)
HALF = (torch.bfloat16, torch.float16)
FLASH_HEAD = 256


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
    """Attend (B, N, S, H) queries to keys and values; `mask` is bool (True = seen) or added."""
    options = {
        "attn_mask": mask,
        "dropout_p": dropout,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if mask is not None or not prefers_cudnn(q, k, v):
        return scaled_dot_product_attention(q, k, v, **options)
    if flash4.serves(q, k, v, is_causal, dropout):
        return flash4.attention(q, k, v, scale, is_causal)
    if repeatable.serves(q, k, v, is_causal, dropout):
        return repeatable.attention(q, k, v, scale, is_causal)
    if torch.compiler.is_compiling():
        with sdpa_kernel(CUDNN_FIRST, set_priority=True):
            return scaled_dot_product_attention(q, k, v, **options)
    # What sdpa_kernel does, without its thirty microseconds, and without switching on again what
    # the caller has switched off.
    order = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order([_CUDNN, *(other for other in order if other != _CUDNN)])
    try:
        return scaled_dot_product_attention(q, k, v, **options)
    finally:
        torch._C._set_sdp_priority_order(order)


def prefers_cudnn(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Say whether cuDNN is the fastest backend for a call without a mask tensor."""
    smallest, largest = CUDNN_HEADS
    return (
        q.is_cuda
        and q.dtype in HALF
        and smallest <= q.shape[-1] <= largest
        and smallest <= v.shape[-1] <= largest
        and q.shape[-2] >= CUDNN_TOKENS
        and k.shape[-2] >= CUDNN_TOKENS
    )


def serves_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Say whether flash attention takes these tensors, for windows and packed documents."""
    head = q.shape[-1]
    is_head = head == v.shape[-1] and head <= FLASH_HEAD and head % 8 == 0
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
    """Attend to `window` = (left, right) neighbours without a mask tensor, -1 for all of a side.

    For tensors that `serves_flash` accepts: (B, S, N, H), or packed (T, N, H) documents, each of
    which sees itself only. The last query of a sequence sits at its last key.
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
    """Attend as `flash_attention`, and return the log-sum-exp too: (B, N, S), or packed (N, T)."""
    left, right = window
    is_causal = left < 0 and right == 0
    if documents and flash4.serves_packed(q, k, v, window, documents, dropout):
        return flash4.packed_attention_lse(q, k, v, scale, is_causal, documents)
    lengths = documents or (None, None, q.shape[1], k.shape[1])
    found = torch.ops.aten._flash_attention_forward(
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
    return found[0], found[1]
