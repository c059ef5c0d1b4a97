"""The scores of a router in plain torch: both factors are converted, then multiplied."""

from __future__ import annotations

import torch
from torch import Tensor


def router_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x w^T (..., E) in float32 (float64 of float64) for x (..., H) and weight (E, H)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.linear(x.to(dtype), weight.to(dtype))


def check(x: Tensor, weight: Tensor) -> None:
    """Raise for anything but tokens and weights of one dtype and width."""
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:] or x.dtype != weight.dtype:
        raise ValueError(
            f"router_linear needs x (..., H) and weight (E, H) of one dtype, got {tuple(x.shape)} "
            f"of {x.dtype} and {tuple(weight.shape)} of {weight.dtype}"
        )
