"""ring_attention_update in plain torch.

m = max(m1, m2), s = s1 e^(m1 - m) + s2 e^(m2 - m), and out = (out1 s1 e^(m1 - m) + out2 s2 e^(m2 -
m)) / s in float32, in the dtype of the previous output. A row that saw no key yet has s = 0.
Forward only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.ring_attention_update.contract import four_dims


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
    """Return the merged output and its two statistics; the lengths change no number."""
    largest = torch.maximum(prev_softmax_max, cur_softmax_max)
    prev = prev_softmax_sum * torch.exp(prev_softmax_max - largest)
    cur = cur_softmax_sum * torch.exp(cur_softmax_max - largest)
    total = prev + cur
    share = prev / torch.where(total > 0, total, 1.0)
    rest = cur / torch.where(total > 0, total, 1.0)
    before, of_prev = four_dims(prev_attn_out, share, layout)
    now, of_cur = four_dims(cur_attn_out, rest, layout)
    wide = torch.promote_types(prev_attn_out.dtype, torch.float32)
    out = before.to(wide) * of_prev.unsqueeze(-1) + now.to(wide) * of_cur.unsqueeze(-1)
    return out.reshape(prev_attn_out.shape).to(prev_attn_out.dtype), largest, total
