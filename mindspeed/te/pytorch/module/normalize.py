"""Layer norm and RMS norm over the last dimension, with gamma stored as it is or minus one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops.rms_norm import rms_norm as plain_rms_norm


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    zero_centered: bool,
    dtype: torch.dtype,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * gamma + bias, rounded once, to `dtype`."""
    if zero_centered or not x.dtype == weight.dtype == dtype:
        # torch keeps sums in float32 but wants all of one type, and 1 + gamma needs the digits.
        wide = torch.promote_types(x.dtype, torch.float32)
        x, weight, bias = x.to(wide), weight.to(wide) + int(zero_centered), bias.to(wide)
    return F.layer_norm(x, weight.shape, weight, bias, eps).to(dtype)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool, dtype: torch.dtype
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gamma, in `dtype`."""
    if zero_centered:
        weight = weight.to(torch.promote_types(x.dtype, torch.float32)) + 1
    return plain_rms_norm(x, weight, eps).to(dtype)
