"""Numbers of rows as three Triton kernels and two running sums, over blocks of tokens.

The mask is small and is read three times; torch's way makes some thirty tensors of its size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.launch import launch
from mindspeed.ops.routing_rows.reference import RoutingRows

_TILE = 4096  # pairs a program: 32 of each thread's registers


def routing_rows(routing_map: Tensor, num_rows: int | None = None) -> RoutingRows:
    """Number the rows of a mask (T, E); without a number of rows, wait for the device and count."""
    num_tokens, num_experts = routing_map.shape
    if num_rows is None:
        num_rows = int(routing_map.count_nonzero())
    width = triton.next_power_of_2(max(num_experts, 1))
    height = max(_TILE // width, 1)
    blocks = triton.cdiv(num_tokens, height)
    device = routing_map.device
    # One allocation, filled with the pair that is none.
    sizes = (num_rows, num_rows, num_rows, num_tokens + 1)
    none = num_tokens * num_experts
    result = torch.full((sum(sizes),), none, dtype=torch.int32, device=device)
    parts = RoutingRows(*result.split(sizes))
    if not none:
        parts.starts.zero_()
        return parts
    routing_map = routing_map.contiguous()
    counts = torch.empty(num_experts * blocks, dtype=torch.int32, device=device)
    shape = {"HEIGHT": height, "WIDTH": width, "num_warps": 4}
    sizes_in = (num_tokens, num_experts, blocks)
    launch(_count, (blocks,), routing_map, counts, *sizes_in, **shape)
    ends = counts.cumsum(0, dtype=torch.int32)
    per_token = torch.empty(num_tokens, dtype=torch.int32, device=device)
    known = (routing_map, counts, ends)
    launch(_number, (blocks,), *known, per_token, parts.pair_of_row, num_rows, *sizes_in, **shape)
    torch.cumsum(per_token, 0, dtype=torch.int32, out=parts.starts[1:])
    launch(_list, (blocks,), *known, *parts[1:], num_rows, *sizes_in, **shape)
    return parts


@triton.jit
def _tile(mask, num_tokens, num_experts, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    tokens = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    experts = tl.arange(0, WIDTH)
    inside = (tokens < num_tokens)[:, None] & (experts < num_experts)[None, :]
    pairs = tokens[:, None] * num_experts + experts[None, :]
    routed = (tl.load(mask + pairs, mask=inside, other=0) != 0).to(tl.int32)
    return tokens, experts, pairs, routed


@triton.jit
def _count(
    mask, counts, num_tokens, num_experts, blocks, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    # Counts lie by expert, then by block: their running sum is the order of rows.
    tokens, experts, pairs, routed = _tile(mask, num_tokens, num_experts, HEIGHT, WIDTH)
    place = counts + experts * blocks + tl.program_id(0)
    tl.store(place, tl.sum(routed, axis=0), mask=experts < num_experts)


@triton.jit
def _rows(
    mask, counts, ends, num_tokens, num_experts, blocks, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    tokens, experts, pairs, routed = _tile(mask, num_tokens, num_experts, HEIGHT, WIDTH)
    column = experts * blocks + tl.program_id(0)
    known = experts < num_experts
    first = tl.load(ends + column, mask=known, other=0)
    first -= tl.load(counts + column, mask=known, other=0)
    rows = first[None, :] + tl.cumsum(routed, axis=0) - routed
    return tokens, pairs, routed, rows


@triton.jit
def _number(
    mask,
    counts,
    ends,
    per_token,
    pair_of_row,
    num_rows,
    num_tokens,
    num_experts,
    blocks,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tokens, pairs, routed, rows = _rows(
        mask, counts, ends, num_tokens, num_experts, blocks, HEIGHT, WIDTH
    )
    kept = (routed != 0) & (rows < num_rows)
    tl.store(pair_of_row + rows, pairs, mask=kept)
    tl.store(per_token + tokens, tl.sum(kept.to(tl.int32), axis=1), mask=tokens < num_tokens)


@triton.jit
def _list(
    mask,
    counts,
    ends,
    row_of_rank,
    pair_of_rank,
    starts,
    num_rows,
    num_tokens,
    num_experts,
    blocks,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tokens, pairs, routed, rows = _rows(
        mask, counts, ends, num_tokens, num_experts, blocks, HEIGHT, WIDTH
    )
    kept = (routed != 0) & (rows < num_rows)
    count = kept.to(tl.int32)
    # What is behind a token's first is written already, by the running sum; the very first is 0.
    first = tl.load(starts + tokens, mask=(tokens > 0) & (tokens < num_tokens), other=0)
    rank = first[:, None] + tl.cumsum(count, axis=1) - count
    tl.store(row_of_rank + rank, rows, mask=kept)
    tl.store(pair_of_rank + rank, pairs, mask=kept)
    if tl.program_id(0) == 0:
        tl.store(starts, 0)
