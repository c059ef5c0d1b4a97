"""Moments of an optimizer in fewer bits."""

from __future__ import annotations

import torch
from torch import Tensor

# Megatron names float8 state by its storage type.
FLOAT8_STORAGE = torch.uint8
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, FLOAT8_STORAGE)
_SCALED = {torch.float16: torch.float16, FLOAT8_STORAGE: torch.float8_e4m3fn}


def encode(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Store a float32 tensor in `dtype`; return it and its scale (None where none is needed).

    float16 and float8 have too small a range for second moments: the tensor is scaled so that its
    largest element is the largest number of the type.
    """
    if dtype not in _SCALED:
        return value.to(dtype), None
    kind = _SCALED[dtype]
    largest = value.abs().amax() if value.numel() else value.new_zeros(())
    scale = largest / torch.finfo(kind).max
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (value / scale).to(kind).view(dtype), scale


def decode(stored: Tensor, scale: Tensor | None) -> Tensor:
    """Return the float32 tensor that `encode` stored."""
    if scale is None:
        return stored.float()
    return stored.view(_SCALED[stored.dtype]).float() * scale
