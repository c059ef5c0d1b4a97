"""Sum of columns in plain torch: float32 sums (float64 for float64), rounded once. No gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.dispatch import refuse_gradient


def column_sum(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sums (N,) of the columns of x (M, N), in the dtype of x by default."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(dtype or x.dtype)


def check(x: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise for anything but a floating-point matrix, and for inputs that require a gradient."""
    refuse_gradient("column_sum", [x])
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"column_sum needs a matrix of floats, got {tuple(x.shape)} of {x.dtype}")
