"""Append a matmul in one kernel, which multiplies each tile of x while it copies it.

x is read once. The GEMM is as narrow as the rank of an adapter: it costs nothing beside the copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.append_matmul import reference
from mindspeed.ops.dispatch import is_tracing
from mindspeed.ops.launch import launch

_DTYPES = (torch.bfloat16, torch.float16)
# 24 KiB a stage for 64 rows of a: two programs share a multiprocessor, 32,768 rows are one wave.
_BLOCK_M, _BLOCK_K, _NUM_STAGES, _NUM_WARPS = 128, 64, 4, 4
_MIN_N, _MAX_N = 16, 128  # what a tile of tensor cores takes, and registers hold


def append_matmul(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return [x | x a^T] (M, K + N) for x (M, K) and a (N, K), and x a^T (M, N) on its own."""
    (M, K), N = x.shape, len(a)
    is_supported = x.dtype in _DTYPES and 0 < N <= _MAX_N and M > 0 and K > 0
    if is_tracing() or not is_supported:
        return reference.append_matmul(x, a)
    x = x if x.stride(1) == 1 else x.contiguous()
    out, low = x.new_empty(M, K + N), x.new_empty(M, N)
    launch(
        _append_matmul,
        (triton.cdiv(M, _BLOCK_M),),
        x,
        a,
        out,
        low,
        M,
        N,
        K,
        x.stride(0),
        *a.stride(),
        K + N,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=max(triton.next_power_of_2(N), _MIN_N),
        BLOCK_K=_BLOCK_K,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )
    return out, low


@triton.jit
def _append_matmul(
    x_ptr,
    a_ptr,
    out_ptr,
    low_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_an,
    stride_ak,
    stride_om,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask_m, mask_n = (offs_m < M)[:, None], (offs_n < N)[None, :]
    x_ptrs, out_ptrs = x_ptr + offs_m[:, None] * stride_xm, out_ptr + offs_m[:, None] * stride_om
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start_k in range(0, K, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        mask_x = mask_m & (offs_k < K)[None, :]
        x = tl.load(x_ptrs + offs_k[None, :], mask=mask_x, other=0.0)
        a_ptrs = a_ptr + offs_k[:, None] * stride_ak + offs_n[None, :] * stride_an
        a = tl.load(a_ptrs, mask=(offs_k < K)[:, None] & mask_n, other=0.0)
        acc = tl.dot(x, a, acc)
        tl.store(out_ptrs + offs_k[None, :], x, mask=mask_x)
    low = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs + K + offs_n[None, :], low, mask=mask_m & mask_n)
    tl.store(low_ptr + offs_m[:, None] * N + offs_n[None, :], low, mask=mask_m & mask_n)
