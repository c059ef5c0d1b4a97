"""The logarithm of the sum of exponentials in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def row_logsumexp(x: Tensor) -> Tensor:
    """Return log(sum(exp(x))) over the columns of (T, E), in float32 (float64 of float64)."""
    return torch.logsumexp(x.to(torch.promote_types(x.dtype, torch.float32)), dim=1)


def check(x: Tensor) -> None:
    """Raise for anything but a matrix of numbers."""
    if x.dim() != 2 or not x.is_floating_point() or not x.shape[1]:
        raise ValueError(
            f"row_logsumexp needs a matrix (T, E) with columns, got {tuple(x.shape)} of {x.dtype}"
        )
