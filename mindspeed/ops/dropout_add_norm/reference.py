"""Dropout, residual and norm in plain torch.

z = dropout(x0 * rowscale * layerscale) + residual, rounded to the dtype of the residual, and
out = norm(z) * weight + bias in the dtype of x0. The arithmetic is float32 at least.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import Unpack

from mindspeed.ops.dropout_add_norm.contract import Options, results, sum_dtype


def dropout_add_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    *,
    is_rms: bool,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor | None, ...]:
    """Return the norm [, z if prenorm] [, the mask of what was kept if return_dropout_mask]."""
    z, mask = _mix(x0, residual, dropout_p, options)
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    norm = functional.rms_norm if is_rms else functional.layer_norm
    out = norm(wide, weight.shape, eps=epsilon) * weight
    out = out if bias is None else out + bias
    return results(out.to(x0.dtype), z, mask, options)


dropout_add_layer_norm = functools.partial(dropout_add_norm, is_rms=False)
dropout_add_rms_norm = functools.partial(dropout_add_norm, is_rms=True)


def _mix(
    x0: Tensor, residual: Tensor | None, dropout_p: float, options: Options
) -> tuple[Tensor, Tensor]:
    value = x0.to(torch.promote_types(x0.dtype, torch.float32))
    rowscale, layerscale = options.get("rowscale"), options.get("layerscale")
    if rowscale is not None:
        value = value * rowscale.unsqueeze(-1)
    if layerscale is not None:
        value = value * layerscale
    mask = torch.rand(x0.shape, device=x0.device) >= dropout_p
    if dropout_p:
        value = value * mask / (1 - dropout_p)
    if residual is not None:
        value = value + residual
    return value.to(sum_dtype(x0, residual, options.get("residual_in_fp32", False))), mask
