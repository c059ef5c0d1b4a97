"""Grouped GEMM by torch's CUTLASS kernel: one launch, and the group sizes stay on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.gmm import triton_impl
from mindspeed.ops.gmm.reference import LOOP, Kernels, make_operators

_ALIGNMENT = 16  # bytes; the kernel's TMA loads need each row aligned


def rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows (M, K) by its matrix of weight (E, K, N)."""
    if _is_supported(x.dtype, x.shape[1], weight.shape[2]) and len(x):
        return torch._grouped_mm(_aligned(x), _aligned(weight), offs=ends)
    # Float32 and float64 go to cuBLAS, group by group, to keep their precision.
    fallback = triton_impl if x.itemsize == 2 else LOOP
    return fallback.rows(x, weight, ends)


def outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows x^T (K, m) by the same rows of y (m, N): (E, K, N)."""
    if _is_supported(x.dtype, x.shape[1], y.shape[1]) and len(x):
        return torch._grouped_mm(_aligned(x).t(), _aligned(y), offs=ends)
    fallback = triton_impl if x.itemsize == 2 else LOOP
    return fallback.outer(x, y, ends)


def _is_supported(dtype: torch.dtype, *row_lengths: int) -> bool:
    """Return whether torch's kernel takes rows of these lengths."""
    is_aligned = all(length * dtype.itemsize % _ALIGNMENT == 0 for length in row_lengths)
    return dtype == torch.bfloat16 and is_aligned


def _aligned(x: Tensor) -> Tensor:
    """Return x with one of the last two dimensions contiguous and the other aligned."""
    for fast, slow in ((-1, -2), (-2, -1)):
        is_aligned = x.stride(slow) * x.itemsize % _ALIGNMENT == 0
        if x.stride(fast) == 1 and is_aligned and x.stride(slow) >= x.shape[fast]:
            return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()
    return x.contiguous()


gmm, gmm_v2 = make_operators(Kernels(rows, outer))
