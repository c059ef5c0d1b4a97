"""Optimizer state in fewer bits: scaled moments, and float32 weights as bfloat16 + remainder."""

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


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 weights into bfloat16 weights and an int16 remainder, losing nothing.

    The bits of the float32 are (bits of the bfloat16 << 16) + remainder; the remainder is signed,
    so the bfloat16 is the nearest one (ties away from zero) and can be trained with as it is.
    """
    bits = master.contiguous().view(torch.int32)
    remainder = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
    high = (bits - remainder) >> 16
    return high.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 weights of bfloat16 weights and their remainder."""
    high = param.contiguous().view(torch.int16).to(torch.int32)
    return ((high << 16) + remainder.to(torch.int32)).view(torch.float32)
