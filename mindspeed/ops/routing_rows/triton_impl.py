"""Row numbers of a routing mask by three Triton kernels and two cumulative sums.

The mask is small and is read three times; plain torch allocates some thirty tensors of its size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.launch import launch
from mindspeed.ops.routing_rows.reference import RoutingRows

_TILE = 4096  # pairs per program: 32 registers of each thread


def routing_rows(routing_map: Tensor, num_rows: int | None = None) -> tuple[RoutingRows, Tensor]:
    """Number the rows of a mask (T, E); without num_rows, synchronise with the device and count.

    Also return the first row of each expert, and the end of the last: (E + 1,) int32.
    """
    num_tokens, num_experts = routing_map.shape
    if num_rows is None:
        num_rows = int(routing_map.count_nonzero())
    block_e = triton.next_power_of_2(max(num_experts, 1))
    block_t = max(_TILE // block_e, 1)
    num_blocks = triton.cdiv(num_tokens, block_t)
    device = routing_map.device
    # One allocation, filled with the number of no pair.
    sizes = (num_rows, num_rows, num_rows, num_tokens + 1)
    none = num_tokens * num_experts
    result = torch.full((sum(sizes),), none, dtype=torch.int32, device=device)
    parts = RoutingRows(*result.split(sizes))
    bounds = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    if not none:
        parts.starts.zero_()
        return parts, bounds.zero_()
    routing_map = routing_map.contiguous()
    counts = torch.empty(num_experts * num_blocks, dtype=torch.int32, device=device)
    constants = {"BLOCK_T": block_t, "BLOCK_E": block_e, "num_warps": 4}
    shape = (num_tokens, num_experts, num_blocks)
    grid = (num_blocks,)
    launch(_count_rows, grid, routing_map, counts, *shape, **constants)
    ends = counts.cumsum(0, dtype=torch.int32)
    per_token = torch.empty(num_tokens, dtype=torch.int32, device=device)
    inputs = (routing_map, counts, ends)
    outputs = (per_token, parts.pair_of_row)
    launch(_number_rows, grid, *inputs, *outputs, num_rows, *shape, **constants)
    torch.cumsum(per_token, 0, dtype=torch.int32, out=parts.starts[1:])
    launch(_sort_by_token, grid, *inputs, *parts[1:], bounds, num_rows, *shape, **constants)
    return parts, bounds


@triton.jit
def _load_tile(mask_ptr, num_tokens, num_experts, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, BLOCK_E)
    mask = (offs_t < num_tokens)[:, None] & (offs_e < num_experts)[None, :]
    pairs = offs_t[:, None] * num_experts + offs_e[None, :]
    routed = (tl.load(mask_ptr + pairs, mask=mask, other=0) != 0).to(tl.int32)
    return offs_t, offs_e, pairs, routed


@triton.jit
def _count_rows(
    mask_ptr,
    counts_ptr,
    num_tokens,
    num_experts,
    num_blocks,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # Counts are ordered by expert, then by block: their cumulative sum is the order of rows.
    offs_t, offs_e, pairs, routed = _load_tile(mask_ptr, num_tokens, num_experts, BLOCK_T, BLOCK_E)
    count_ptrs = counts_ptr + offs_e * num_blocks + tl.program_id(0)
    tl.store(count_ptrs, tl.sum(routed, axis=0), mask=offs_e < num_experts)


@triton.jit
def _row_ids(
    mask_ptr,
    counts_ptr,
    ends_ptr,
    num_tokens,
    num_experts,
    num_blocks,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    offs_t, offs_e, pairs, routed = _load_tile(mask_ptr, num_tokens, num_experts, BLOCK_T, BLOCK_E)
    offs = offs_e * num_blocks + tl.program_id(0)
    mask_e = offs_e < num_experts
    first = tl.load(ends_ptr + offs, mask=mask_e, other=0)
    first -= tl.load(counts_ptr + offs, mask=mask_e, other=0)
    rows = first[None, :] + tl.cumsum(routed, axis=0) - routed
    return offs_t, pairs, routed, rows


@triton.jit
def _number_rows(
    mask_ptr,
    counts_ptr,
    ends_ptr,
    per_token_ptr,
    pair_of_row_ptr,
    num_rows,
    num_tokens,
    num_experts,
    num_blocks,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    offs_t, pairs, routed, rows = _row_ids(
        mask_ptr, counts_ptr, ends_ptr, num_tokens, num_experts, num_blocks, BLOCK_T, BLOCK_E
    )
    keep = (routed != 0) & (rows < num_rows)
    tl.store(pair_of_row_ptr + rows, pairs, mask=keep)
    tl.store(per_token_ptr + offs_t, tl.sum(keep.to(tl.int32), axis=1), mask=offs_t < num_tokens)


@triton.jit
def _sort_by_token(
    mask_ptr,
    counts_ptr,
    ends_ptr,
    row_of_rank_ptr,
    pair_of_rank_ptr,
    starts_ptr,
    bounds_ptr,
    num_rows,
    num_tokens,
    num_experts,
    num_blocks,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    offs_t, pairs, routed, rows = _row_ids(
        mask_ptr, counts_ptr, ends_ptr, num_tokens, num_experts, num_blocks, BLOCK_T, BLOCK_E
    )
    keep = (routed != 0) & (rows < num_rows)
    count = keep.to(tl.int32)
    # starts[1:] is written already, by the cumulative sum; starts[0] is 0.
    first = tl.load(starts_ptr + offs_t, mask=(offs_t > 0) & (offs_t < num_tokens), other=0)
    rank = first[:, None] + tl.cumsum(count, axis=1) - count
    tl.store(row_of_rank_ptr + rank, rows, mask=keep)
    tl.store(pair_of_rank_ptr + rank, pairs, mask=keep)
    if tl.program_id(0) == 0:
        tl.store(starts_ptr, 0)
        tl.store(bounds_ptr, 0)
        offs_e = tl.arange(0, BLOCK_E)
        mask_e = offs_e < num_experts
        ends = tl.load(ends_ptr + (offs_e + 1) * num_blocks - 1, mask=mask_e, other=0)
        tl.store(bounds_ptr + 1 + offs_e, tl.minimum(ends, num_rows), mask=mask_e)
