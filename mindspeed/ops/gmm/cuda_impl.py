"""Grouped matrix products by torch's CUTLASS kernel: one launch, and the sizes stay on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.gmm import triton_impl
from mindspeed.ops.gmm.contract import Products, operators
from mindspeed.ops.gmm.reference import LOOP

_ALIGNMENT = 16  # bytes; what the kernel's bulk loads ask of each row


def rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows (M, K) by its matrix of weight (E, K, N)."""
    if _fits(x.dtype, x.shape[1], weight.shape[2]) and len(x):
        return torch._grouped_mm(_dense(x), _dense(weight), offs=ends)
    # Float32 and float64 go to cuBLAS, group by group, for the sake of their precision.
    other = triton_impl if x.itemsize == 2 else LOOP
    return other.rows(x, weight, ends)


def outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows x^T (K, m) by the same rows of y (m, N): (E, K, N)."""
    if _fits(x.dtype, x.shape[1], y.shape[1]) and len(x):
        return torch._grouped_mm(_dense(x).t(), _dense(y), offs=ends)
    other = triton_impl if x.itemsize == 2 else LOOP
    return other.outer(x, y, ends)


def _fits(dtype: torch.dtype, *row_lengths: int) -> bool:
    """Whether torch's kernel takes rows of these lengths."""
    is_aligned = all(length * dtype.itemsize % _ALIGNMENT == 0 for length in row_lengths)
    return dtype == torch.bfloat16 and is_aligned


def _dense(x: Tensor) -> Tensor:
    """Return x with one of the last two dimensions contiguous and the other aligned."""
    for fast, slow in ((-1, -2), (-2, -1)):
        aligned = x.stride(slow) * x.itemsize % _ALIGNMENT == 0
        if x.stride(fast) == 1 and aligned and x.stride(slow) >= x.shape[fast]:
            return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()
    return x.contiguous()


gmm, gmm_v2 = operators(Products(rows, outer))
