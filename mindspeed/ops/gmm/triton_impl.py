"""Grouped products of the types and sizes that torch's kernel does not take, also int8.

One program makes one tile; it finds its group by the running number of tiles, so that the host
need not know the sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.groupmatmul_add_fp32.triton_impl import groupmatmul_add_fp32
from mindspeed.ops.launch import launch

_TILE_M, _TILE_N, _TILE_K = 128, 128, 64


def rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows (M, K) by its matrix of weight (E, K, N); int8 gives int32."""
    num_groups, height, width = weight.shape
    is_int = x.dtype == torch.int8
    out = x.new_empty(len(x), width, dtype=torch.int32 if is_int else x.dtype)
    if out.numel() == 0 or height == 0:
        return out.zero_()
    # A group's last tile may be short, so there may be one tile more for each group.
    tiles = triton.cdiv(len(x), _TILE_M) + num_groups
    launch(
        _multiply,
        (tiles * triton.cdiv(width, _TILE_N),),
        x,
        weight,
        ends,
        out,
        num_groups,
        height,
        width,
        *x.stride(),
        *weight.stride(),
        GROUPS=triton.next_power_of_2(num_groups),
        TILE_M=_TILE_M,
        TILE_N=_TILE_N,
        TILE_K=_TILE_K,
        INT=is_int,
        num_warps=8,
        num_stages=3,
    )
    return out


def outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows x^T (K, m) by the same rows of y (m, N): (E, K, N)."""
    total = x.new_zeros(len(ends), x.shape[1], y.shape[1], dtype=torch.float32)
    groupmatmul_add_fp32(x, y, ends, total)
    return total.to(x.dtype)


@triton.jit
def _multiply(
    x,
    weight,
    ends,
    out,
    num_groups,
    height,
    width,
    stride_x,
    stride_x_k,
    stride_group,
    stride_k,
    stride_n,
    GROUPS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    INT: tl.constexpr,
):
    tiles_n = tl.cdiv(width, TILE_N)
    tile = tl.program_id(0) // tiles_n
    groups = tl.arange(0, GROUPS)
    known = groups < num_groups
    last = tl.load(ends + groups, mask=known, other=0)
    first = tl.load(ends + groups - 1, mask=known & (groups > 0), other=0)
    tiles = tl.where(known, (last - first + TILE_M - 1) // TILE_M, 0)
    upto = tl.cumsum(tiles, axis=0)
    group = tl.sum((known & (upto <= tile)).to(tl.int32), axis=0)
    if group >= num_groups:
        return
    is_mine = groups == group
    skipped = tl.sum(tl.where(is_mine, upto - tiles, 0), axis=0)
    start = tl.sum(tl.where(is_mine, first, 0), axis=0) + (tile - skipped) * TILE_M
    end = tl.sum(tl.where(is_mine, last, 0), axis=0)

    ms = start + tl.arange(0, TILE_M)
    ns = tl.program_id(0) % tiles_n * TILE_N + tl.arange(0, TILE_N)
    ks = tl.arange(0, TILE_K)
    in_m, in_n = ms < end, ns < width
    a_tile = x + ms[:, None].to(tl.int64) * stride_x + ks[None, :] * stride_x_k
    b_tile = weight + group.to(tl.int64) * stride_group
    b_tile += ks[:, None].to(tl.int64) * stride_k + ns[None, :].to(tl.int64) * stride_n
    SUM: tl.constexpr = tl.int32 if INT else tl.float32
    total = tl.zeros((TILE_M, TILE_N), dtype=SUM)
    for done in range(0, height, TILE_K):
        in_k = ks < height - done
        a = tl.load(a_tile, mask=in_m[:, None] & in_k[None, :], other=0)
        b = tl.load(b_tile, mask=in_k[:, None] & in_n[None, :], other=0)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=SUM)
        a_tile += TILE_K * stride_x_k
        b_tile += TILE_K * stride_k
    place = out + ms[:, None].to(tl.int64) * width + ns[None, :]
    tl.store(place, total, mask=in_m[:, None] & in_n[None, :])
