"""Products of consecutive groups of rows, each with a matrix of its own."""

from __future__ import annotations

import torch
from torch import Tensor


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """Multiply the i-th group of rows of `a` by `b[i]`, transposed if asked: (T, K) -> (T, N)."""
    sizes = batch_sizes.tolist()
    if len(sizes) != len(b) or sum(sizes) != len(a):
        raise ValueError(
            f"gmm was given {len(a)} rows and {len(b)} matrices for groups of {sizes} rows: "
            "one size a matrix, and all rows in a group, are needed"
        )
    matrices = b.transpose(1, 2) if trans_b else b
    return torch.cat([rows @ matrix for rows, matrix in zip(a.split(sizes), matrices, strict=True)])
