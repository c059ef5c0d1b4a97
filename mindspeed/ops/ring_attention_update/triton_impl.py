"""ring_attention_update in Triton: every number is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.launch import launch
from mindspeed.ops.ring_attention_update import reference
from mindspeed.ops.ring_attention_update.contract import four_dims

# A program merges the heads of one token, about 4096 numbers at a time.
TILE, WARPS = 4096, 4


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
    outs = prev_attn_out.detach().contiguous(), cur_attn_out.detach().contiguous()
    statistics = [
        x.detach().contiguous()
        for x in (prev_softmax_max, prev_softmax_sum, cur_softmax_max, cur_softmax_sum)
    ]
    if any(x.dtype == torch.float64 for x in (*outs, *statistics)):
        first, second = statistics[:2], statistics[2:]
        return reference.ring_attention_update(outs[0], *first, outs[1], *second, layout=layout)
    out, largest, total = (torch.empty_like(x) for x in (outs[0], *statistics[:2]))
    heads_of, one = four_dims(outs[0], statistics[0], layout)
    tokens, batch, heads, size = heads_of.shape
    block = triton.next_power_of_2(size)
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
            size,
            batch,
            *one.stride(),
            BLOCK=block,
            HEADS=min(triton.next_power_of_2(heads), max(1, TILE // block)),
            num_warps=WARPS,
        )
    return out, largest, total


@triton.jit
def _merge(
    prev,
    cur,
    prev_max,
    prev_sum,
    cur_max,
    cur_sum,
    out,
    out_max,
    out_sum,
    heads,
    size,
    batch,
    stride_i,
    stride_j,
    stride_n,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = (token // batch) * stride_i + (token % batch) * stride_j
    channel = tl.arange(0, BLOCK)[None, :]
    copies = tl.arange(0, 8)[None, :]
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        is_head = head < heads
        at = row + head * stride_n
        m1 = tl.load(prev_max + at, mask=is_head, other=0.0)
        m2 = tl.load(cur_max + at, mask=is_head, other=0.0)
        largest = tl.maximum(m1, m2)
        s1 = tl.load(prev_sum + at, mask=is_head, other=0.0) * tl.exp(m1 - largest)
        s2 = tl.load(cur_sum + at, mask=is_head, other=0.0) * tl.exp(m2 - largest)
        total = s1 + s2
        share = 1.0 / tl.where(total > 0.0, total, 1.0)
        place = (token * heads + head)[:, None] * size + channel
        inside = is_head[:, None] & (channel < size)
        before = tl.load(prev + place, mask=inside, other=0.0).to(tl.float32)
        now = tl.load(cur + place, mask=inside, other=0.0).to(tl.float32)
        merged = before * (s1 * share)[:, None] + now * (s2 * share)[:, None]
        tl.store(out + place, merged.to(out.dtype.element_ty), mask=inside)
        every = at[:, None] + copies
        is_every = is_head[:, None] & (copies < 8)
        tl.store(out_max + every, tl.broadcast_to(largest[:, None], (HEADS, 8)), mask=is_every)
        tl.store(out_sum + every, tl.broadcast_to(total[:, None], (HEADS, 8)), mask=is_every)
