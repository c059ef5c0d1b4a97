"""Dropout, residual and norm in Triton, by the kernels that all norms share.

The dropout is drawn again in backward from its seed: no mask is kept, or made unless asked for.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from typing_extensions import Unpack

from mindspeed.ops.dropout_add_norm import reference
from mindspeed.ops.dropout_add_norm.contract import Options, results, sum_dtype
from mindspeed.ops.norm.triton_impl import Plan, is_served, normalise


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
    if not is_served(x0):
        return reference.dropout_add_norm(
            x0, residual, weight, bias, dropout_p, epsilon, is_rms=is_rms, **options
        )
    plan = Plan(epsilon, is_rms=is_rms, drop=dropout_p)
    rowscale, layerscale = options.get("rowscale"), options.get("layerscale")
    wants_mask = options.get("return_dropout_mask", False)
    kind = sum_dtype(x0, residual, options.get("residual_in_fp32", False))
    given = (residual, rowscale, layerscale)
    if plan.drop or kind != x0.dtype or any(tensor is not None for tensor in given):
        plan = plan._replace(sum_dtype=kind)
    seed = None
    if plan.drop:
        plan = plan._replace(wants_mask=wants_mask)
        # From the generator of the device, so that Megatron's states and recompute replay it.
        seed = torch.randint(0, 2**62, (1,), device=x0.device)
    out, z, mask = normalise(plan, x0, residual, weight, bias, rowscale, layerscale, seed)
    if wants_mask and mask is None:
        mask = torch.ones(x0.shape, dtype=torch.bool, device=x0.device)
    return results(out, x0 if z is None else z, mask, options)


dropout_add_layer_norm = functools.partial(dropout_add_norm, is_rms=False)
dropout_add_rms_norm = functools.partial(dropout_add_norm, is_rms=True)
