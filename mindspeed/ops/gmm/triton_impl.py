"""Grouped GEMM for the dtypes and sizes that torch's kernel does not support, and for int8.

One program computes one tile; it finds its group by the cumulative number of tiles, so that the
host need not know the sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.groupmatmul_add_fp32.triton_impl import groupmatmul_add_fp32
from mindspeed.ops.launch import launch

_BLOCK_M, _BLOCK_N, _BLOCK_K = 128, 128, 64


def rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows (M, K) by its matrix of weight (E, K, N); int8 gives int32."""
    num_groups, K, N = weight.shape
    is_int = x.dtype == torch.int8
    out = x.new_empty(len(x), N, dtype=torch.int32 if is_int else x.dtype)
    if out.numel() == 0 or K == 0:
        return out.zero_()
    # A group's last tile may be partial, so there may be one tile more for each group.
    tiles_m = triton.cdiv(len(x), _BLOCK_M) + num_groups
    launch(
        _grouped_matmul,
        (tiles_m * triton.cdiv(N, _BLOCK_N),),
        x,
        weight,
        ends,
        out,
        num_groups,
        K,
        N,
        *x.stride(),
        *weight.stride(),
        BLOCK_G=triton.next_power_of_2(num_groups),
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        IS_INT=is_int,
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
def _grouped_matmul(
    x_ptr,
    weight_ptr,
    ends_ptr,
    out_ptr,
    num_groups,
    K,
    N,
    stride_xm,
    stride_xk,
    stride_wg,
    stride_wk,
    stride_wn,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_INT: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    offs_g = tl.arange(0, BLOCK_G)
    mask_g = offs_g < num_groups
    ends = tl.load(ends_ptr + offs_g, mask=mask_g, other=0)
    starts = tl.load(ends_ptr + offs_g - 1, mask=mask_g & (offs_g > 0), other=0)
    tiles = tl.where(mask_g, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    cum_tiles = tl.cumsum(tiles, axis=0)
    group = tl.sum((mask_g & (cum_tiles <= tile)).to(tl.int32), axis=0)
    if group >= num_groups:
        return
    is_group = offs_g == group
    first_tile = tl.sum(tl.where(is_group, cum_tiles - tiles, 0), axis=0)
    start = tl.sum(tl.where(is_group, starts, 0), axis=0) + (tile - first_tile) * BLOCK_M
    end = tl.sum(tl.where(is_group, ends, 0), axis=0)

    offs_m = start + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m, mask_n = offs_m < end, offs_n < N
    x_ptrs = x_ptr + offs_m[:, None].to(tl.int64) * stride_xm + offs_k[None, :] * stride_xk
    w_ptrs = weight_ptr + group.to(tl.int64) * stride_wg
    w_ptrs += offs_k[:, None].to(tl.int64) * stride_wk + offs_n[None, :].to(tl.int64) * stride_wn
    ACC_DTYPE: tl.constexpr = tl.int32 if IS_INT else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_DTYPE)
    for done in range(0, K, BLOCK_K):
        mask_k = offs_k < K - done
        x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0)
        w = tl.load(w_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0)
        acc = tl.dot(x, w, acc, input_precision="ieee", out_dtype=ACC_DTYPE)
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk
    out_ptrs = out_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :]
    tl.store(out_ptrs, acc, mask=mask_m[:, None] & mask_n[None, :])
