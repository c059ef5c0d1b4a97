"""ring_attention_update in Triton: every element is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.launch import launch
from mindspeed.ops.ring_attention_update import reference
from mindspeed.ops.ring_attention_update.reference import four_dims

# A program merges the heads of one token, about 4096 elements at a time.
TILE, NUM_WARPS = 4096, 4


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
    outs = prev_attn_out.detach().contiguous(), cur_attn_out.detach().contiguous()
    statistics = [
        x.detach().contiguous()
        for x in (prev_softmax_max, prev_softmax_sum, cur_softmax_max, cur_softmax_sum)
    ]
    if any(x.dtype == torch.float64 for x in (*outs, *statistics)):
        max1, sum1, max2, sum2 = statistics
        return reference.ring_attention_update(
            outs[0], max1, sum1, outs[1], max2, sum2, layout=layout
        )
    out, largest, total = (torch.empty_like(x) for x in (outs[0], *statistics[:2]))
    out_heads, statistic = four_dims(outs[0], statistics[0], layout)
    tokens, batch, heads, head_dim = out_heads.shape
    block_d = triton.next_power_of_2(head_dim)
    if out.numel():
        launch(
            _merge,
            (tokens * batch,),
            *outs,
            *statistics,
            out,
            largest,
            total,
            heads,
            head_dim,
            batch,
            *statistic.stride(),
            BLOCK_D=block_d,
            BLOCK_H=min(triton.next_power_of_2(heads), max(1, TILE // block_d)),
            num_warps=NUM_WARPS,
        )
    return out, largest, total


@triton.jit
def _merge(
    prev_ptr,
    cur_ptr,
    prev_max_ptr,
    prev_sum_ptr,
    cur_max_ptr,
    cur_sum_ptr,
    out_ptr,
    out_max_ptr,
    out_sum_ptr,
    num_heads,
    head_dim,
    batch,
    stride_s,
    stride_b,
    stride_h,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    stat_row = (token // batch) * stride_s + (token % batch) * stride_b
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    copies = tl.arange(0, 8)[None, :]
    for start_h in range(0, num_heads, BLOCK_H):
        offs_h = start_h + tl.arange(0, BLOCK_H)
        mask_h = offs_h < num_heads
        stat_offs = stat_row + offs_h * stride_h
        m1 = tl.load(prev_max_ptr + stat_offs, mask=mask_h, other=0.0)
        m2 = tl.load(cur_max_ptr + stat_offs, mask=mask_h, other=0.0)
        m = tl.maximum(m1, m2)
        s1 = tl.load(prev_sum_ptr + stat_offs, mask=mask_h, other=0.0) * tl.exp(m1 - m)
        s2 = tl.load(cur_sum_ptr + stat_offs, mask=mask_h, other=0.0) * tl.exp(m2 - m)
        s = s1 + s2
        inverse = 1.0 / tl.where(s > 0.0, s, 1.0)
        offs = (token * num_heads + offs_h)[:, None] * head_dim + offs_d
        mask = mask_h[:, None] & (offs_d < head_dim)
        prev = tl.load(prev_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        cur = tl.load(cur_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        out = prev * (s1 * inverse)[:, None] + cur * (s2 * inverse)[:, None]
        tl.store(out_ptr + offs, out.to(out_ptr.dtype.element_ty), mask=mask)
        copy_offs = stat_offs[:, None] + copies
        copy_mask = mask_h[:, None] & (copies < 8)
        tl.store(out_max_ptr + copy_offs, tl.broadcast_to(m[:, None], (BLOCK_H, 8)), mask=copy_mask)
        tl.store(out_sum_ptr + copy_offs, tl.broadcast_to(s[:, None], (BLOCK_H, 8)), mask=copy_mask)
