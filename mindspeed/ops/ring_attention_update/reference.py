"""ring_attention_update in plain torch.

m = max(m1, m2), s = s1 e^(m1 - m) + s2 e^(m2 - m), and out = (out1 s1 e^(m1 - m) + out2 s2 e^(m2 -
m)) / s in float32, in the dtype of the previous output. A row without any key so far has s = 0.
Forward only. Outputs are (S, B, N * D) with statistics (B, N, S, 8) for layout SBH, and (T, N, D)
with (T, N, 8) for TND; a statistic is one number, eight times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("SBH", "TND")


@torch.no_grad()
def ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    *,
    actual_seq_qlen: Tensor | None = None,
    layout: str = "SBH",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the merged output and its two statistics; actual_seq_qlen has no effect."""
    largest = torch.maximum(prev_softmax_max, cur_softmax_max)
    prev = prev_softmax_sum * torch.exp(prev_softmax_max - largest)
    cur = cur_softmax_sum * torch.exp(cur_softmax_max - largest)
    total = prev + cur
    share = prev / torch.where(total > 0, total, 1.0)
    rest = cur / torch.where(total > 0, total, 1.0)
    prev_out, prev_share = four_dims(prev_attn_out, share, layout)
    cur_out, cur_share = four_dims(cur_attn_out, rest, layout)
    acc_dtype = torch.promote_types(prev_attn_out.dtype, torch.float32)
    out = prev_out.to(acc_dtype) * prev_share.unsqueeze(-1)
    out = out + cur_out.to(acc_dtype) * cur_share.unsqueeze(-1)
    return out.reshape(prev_attn_out.shape).to(prev_attn_out.dtype), largest, total


def four_dims(x: Tensor, statistic: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """View an output as (S, B, N, D) or (T, 1, N, D), and a statistic likewise without copies."""
    if layout == "SBH":
        return x.unflatten(-1, (statistic.shape[1], -1)), statistic[..., 0].permute(2, 0, 1)
    return x.unsqueeze(1), statistic[..., 0].unsqueeze(1)


def check(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    **options: Any,
) -> None:
    """Raise ValueError for tensors that do not match each other or the layout."""
    layout = options.get("layout", "SBH")
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout}: use {' or '.join(LAYOUTS)}")
    statistics = prev_softmax_max, prev_softmax_sum, cur_softmax_max, cur_softmax_sum
    shape = prev_softmax_max.shape
    if any(x.shape != shape for x in statistics) or cur_attn_out.shape != prev_attn_out.shape:
        raise ValueError("the previous and the current tensors must have the same shapes")
    out = prev_attn_out.shape
    is_match = len(out) == 3 and len(shape) == (4 if layout == "SBH" else 3) and shape[-1] == 8
    if is_match and layout == "SBH":
        is_match = out[:2] == (shape[2], shape[0]) and out[2] % shape[1] == 0
    elif is_match:
        is_match = out[:2] == shape[:2]
    if not is_match:
        raise ValueError(
            f"layout={layout}: outputs of shape {tuple(out)} do not match statistics of shape "
            f"{tuple(shape)}"
        )
