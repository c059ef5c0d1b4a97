"""Weight gradients of grouped GEMMs as one Triton kernel.

One program computes one tile of one group's GEMM, over all rows of the group, and adds it to the
float32 output once: no atomics, no temporary. torch's grouped GEMM writes bfloat16 only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed.ops.groupmatmul_add_fp32 import reference
from mindspeed.ops.launch import launch

_BLOCK_M, _NUM_STAGES = 64, 3
_GROUP_SIZE = 8  # tiles that are swizzled buffer
_LONG = 1024  # rows


def groupmatmul_add_fp32(
    x: Tensor, dy: Tensor, group_list: Tensor | Sequence[int], out: Tensor | Sequence[Tensor]
) -> None:
    """Add x_g^T @ dy_g to out for each group of rows."""
    if x.dtype == torch.float64:
        reference.groupmatmul_add_fp32(x, dy, group_list, out)
        return
    ends = torch.as_tensor(group_list).to(x.device, torch.int32, non_blocking=True)
    shape = (len(ends), x.shape[1], dy.shape[1])
    if isinstance(out, Tensor):
        _launch(x, dy, ends, out.view(shape), shape[1] * shape[2])
        return
    stride = _group_stride(out)
    if stride is not None:
        _launch(x, dy, ends, out[0], stride)
        return
    buffer = torch.zeros(shape, dtype=torch.float32, device=x.device)
    _launch(x, dy, ends, buffer, buffer.stride(0))
    torch._foreach_add_(list(out), list(buffer.unbind()))


def _group_stride(totals: Sequence[Tensor]) -> int | None:
    """Return the stride between neighbours, which may be negative, or None if it varies.

    Megatron lays the gradients of a bucket side by side, the last parameter first. A compiler does
    not know the addresses.
    """
    is_known = not torch.compiler.is_compiling()
    if not (is_known and all(total.is_contiguous() for total in totals)):
        return None
    addresses = [total.data_ptr() for total in totals]
    if len(addresses) == 1:
        return 0
    stride = addresses[1] - addresses[0]
    is_even = all(b - a == stride for a, b in zip(addresses, addresses[1:], strict=False))
    return stride // totals[0].itemsize if is_even else None


def _launch(x: Tensor, dy: Tensor, ends: Tensor, out: Tensor, stride_g: int) -> None:
    x, dy = (t if t.stride(1) == 1 else t.contiguous() for t in (x, dy))
    K, N = x.shape[1], dy.shape[1]
    if not (len(ends) and N and K):
        return
    block_k, block_n = _block_sizes(x.dtype, max(K, N), len(x) // len(ends))
    grid = (triton.cdiv(K, block_k) * triton.cdiv(N, block_n), len(ends))
    launch(
        _grouped_wgrad,
        grid,
        x,
        dy,
        ends,
        out,
        K,
        N,
        x.stride(0),
        dy.stride(0),
        stride_g,
        BLOCK_K=block_k,
        BLOCK_N=block_n,
        BLOCK_M=_BLOCK_M if x.itemsize == 2 else 32,
        GROUP_SIZE=_GROUP_SIZE,
        IS_EVEN=K % block_k == 0 and N % block_n == 0,
        num_warps=8 if block_n == 256 else 4,
        num_stages=_NUM_STAGES,
    )


def _block_sizes(dtype: torch.dtype, longest: int, rows: int) -> tuple[int, int]:
    """Return BLOCK_K and BLOCK_N of a GEMM over so many rows."""
    if longest <= 64 or dtype == torch.float32:  # tensor cores do not take exact float32
        return 64, 64
    # Long GEMMs are bound by the L2 cache: tiles of 128 x 256, half the registers of 8 warps and
    # 147 KiB of shared memory, read least. Short ones are bound by reading and writing the output:
    # two programs of 128 x 128 share a multiprocessor, and one multiplies meanwhile.
    return (128, 256) if rows >= _LONG else (128, 128)


@triton.jit
def _grouped_wgrad(
    x_ptr,
    dy_ptr,
    ends_ptr,
    out_ptr,
    K,
    N,
    stride_xm,
    stride_dym,
    stride_og,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    group = tl.program_id(1)
    # Swizzle: neighbouring programs share a square of tiles whose inputs fit into the L2 cache.
    pid, tiles_n = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    pid_k, pid_n = tl.swizzle2d(
        pid // tiles_n, pid % tiles_n, tl.cdiv(K, BLOCK_K), tiles_n, GROUP_SIZE
    )
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(ends_ptr + group)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    if end <= start:
        return

    # Offsets within a block of rows are loop-invariant, only the base pointers advance: that takes
    # the fewest registers. The last, partial block goes through the same loop: a second dot for it
    # makes the compiler serialise the first.
    offs_m = tl.arange(0, BLOCK_M)
    mask_k = offs_k < K
    mask_n = offs_n < N
    x_base = x_ptr + start.to(tl.int64) * stride_xm
    dy_base = dy_ptr + start.to(tl.int64) * stride_dym
    x_offs = offs_m[:, None] * stride_xm + offs_k[None, :]
    dy_offs = offs_m[:, None] * stride_dym + offs_n[None, :]
    acc = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    for done in range(0, end - start, BLOCK_M):
        mask_m = (offs_m < end - start - done)[:, None]
        if IS_EVEN:
            x = tl.load(x_base + x_offs, mask=mask_m, other=0.0)
            dy = tl.load(dy_base + dy_offs, mask=mask_m, other=0.0)
        else:
            x = tl.load(x_base + x_offs, mask=mask_m & mask_k[None, :], other=0.0)
            dy = tl.load(dy_base + dy_offs, mask=mask_m & mask_n[None, :], other=0.0)
        acc = tl.dot(tl.trans(x), dy, acc, input_precision="ieee")
        x_base += BLOCK_M * stride_xm
        dy_base += BLOCK_M * stride_dym

    out_ptrs = out_ptr + group.to(tl.int64) * stride_og
    out_ptrs = out_ptrs + offs_k[:, None].to(tl.int64) * N + offs_n[None, :]
    mask = mask_k[:, None] & mask_n[None, :]
    acc += tl.load(out_ptrs, mask=mask, other=0.0)
    tl.store(out_ptrs, acc, mask=mask)
