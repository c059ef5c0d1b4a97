"""Append a matmul in plain torch: float32 sums at least, rounded once. No gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.dispatch import refuse_gradient


def append_matmul(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return [x | x a^T] (M, K + N) for x (M, K) and a (N, K), and x a^T (M, N) on its own."""
    low = x @ a.t()
    return torch.cat((x, low), 1), low


def check(x: Tensor, a: Tensor) -> None:
    """Raise for anything but two matrices of one dtype that can be multiplied."""
    refuse_gradient("append_matmul", [x, a])
    if x.dim() != 2 or a.dim() != 2 or x.shape[1] != a.shape[1] or x.dtype != a.dtype:
        raise ValueError(
            f"append_matmul needs x (M, K) and a (N, K) of one dtype, got {tuple(x.shape)} of "
            f"{x.dtype} and {tuple(a.shape)} of {a.dtype}"
        )
