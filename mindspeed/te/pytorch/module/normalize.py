"""Layer norm and RMS norm over the last dimension, with gamma stored as it is or minus one."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed.ops.norm import add_rms_norm as plain_add_rms_norm
from mindspeed.ops.norm import layer_norm as plain_layer_norm
from mindspeed.ops.norm import rms_norm as plain_rms_norm


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
    x = _wide_enough(x, dtype)
    weight = _gamma(weight, x, zero_centered)
    return plain_layer_norm(x, weight, bias, eps).to(dtype)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool, dtype: torch.dtype
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gamma, rounded once, to `dtype`."""
    x = _wide_enough(x, dtype)
    return plain_rms_norm(x, _gamma(weight, x, zero_centered), eps).to(dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor] | None:
    """Return rms_norm(x + residual) and the sum, or None where types would change between them."""
    if not x.dtype == residual.dtype == dtype:
        return None
    return plain_add_rms_norm(x, residual, _gamma(weight, x, zero_centered), eps)


def _wide_enough(x: Tensor, dtype: torch.dtype) -> Tensor:
    # The operators answer in the type of x: it must not be the narrower one.
    return x.to(torch.promote_types(x.dtype, dtype))


def _gamma(weight: Tensor, x: Tensor, zero_centered: bool) -> Tensor:
    if not zero_centered:
        return weight
    # 1 + gamma needs the digits.
    return weight.to(torch.promote_types(x.dtype, torch.float32)) + 1
