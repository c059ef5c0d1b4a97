"""RMSNorm and LayerNorm in plain torch, over the last dimension.

rms_norm: y = x * r * gamma with r = 1 / sqrt(mean(x^2) + epsilon).
layer_norm: y = (x - mean) / sqrt(var + epsilon) * weight + bias.
dropout_add_*: z = dropout(x0 * rowscale * layerscale) + residual, rounded to the dtype of the
residual, and y = norm(z) * weight + bias in the dtype of x0.

All arithmetic is float32 (float64 for float64 inputs), rounded once to the dtype of x.
"""

from __future__ import annotations

import functools
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import Unpack


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Divide x (..., H) by its root mean square over the last dimension, times gamma (H,)."""
    return _RMSNorm.apply(x, gamma, epsilon)


def add_rms_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return rms_norm(x + residual) in the dtype of x, and the sum in the dtype of residual."""
    total = (x + residual).to(residual.dtype)
    return _RMSNorm.apply(total, gamma, epsilon).to(x.dtype), total


class _RMSNorm(torch.autograd.Function):
    """Saves x, gamma and one number per row, r, for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
        x_acc = _upcast(x)
        inverse_rms = torch.rsqrt(x_acc.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, gamma, inverse_rms)
        return (x_acc * inverse_rms * gamma).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gamma, inverse_rms = ctx.saved_tensors
        normed = _upcast(x) * inverse_rms
        grad = grad.to(normed.dtype)
        grad_gamma = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
        grad_normed = grad * gamma
        along = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = inverse_rms * (grad_normed - normed * along)
        return grad_x.to(x.dtype), grad_gamma.to(gamma.dtype), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float = 1e-5) -> Tensor:
    """Normalise x (..., H) over the last dimension, times weight (H,), plus bias (H,)."""
    out_dtype = x.dtype
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        # torch accumulates in float32, but takes tensors of one dtype only.
        acc_dtype = torch.promote_types(x.dtype, torch.float32)
        x, weight = x.to(acc_dtype), weight.to(acc_dtype)
        bias = None if bias is None else bias.to(acc_dtype)
    return functional.layer_norm(x, weight.shape, weight, bias, epsilon).to(out_dtype)


class DropoutAddNormOptions(TypedDict, total=False):
    """The keyword arguments of dropout_add_layer_norm and dropout_add_rms_norm."""

    rowscale: Tensor | None
    layerscale: Tensor | None
    prenorm: bool
    residual_in_fp32: bool
    return_dropout_mask: bool


def dropout_add_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    *,
    is_rms: bool,
    **options: Unpack[DropoutAddNormOptions],
) -> Tensor | tuple[Tensor | None, ...]:
    """Return the norm [, z if prenorm] [, the keep mask if return_dropout_mask]."""
    z, mask = _dropout_add(x0, residual, dropout_p, options)
    norm = functional.rms_norm if is_rms else functional.layer_norm
    out = norm(_upcast(z), weight.shape, eps=epsilon) * weight
    out = out if bias is None else out + bias
    return select_outputs(out.to(x0.dtype), z, mask, options)


dropout_add_layer_norm = functools.partial(dropout_add_norm, is_rms=False)
dropout_add_rms_norm = functools.partial(dropout_add_norm, is_rms=True)


def sum_dtype(x0: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> torch.dtype:
    """Return the dtype of z: the residual's, or the requested one."""
    if residual is not None:
        return residual.dtype
    return torch.float32 if residual_in_fp32 else x0.dtype


def select_outputs(
    out: Tensor, pre_norm: Tensor, mask: Tensor | None, options: DropoutAddNormOptions
) -> Tensor | tuple[Tensor | None, ...]:
    """Return the norm, followed by z and the mask where the options request them."""
    outputs: list[Tensor | None] = [out]
    if options.get("prenorm", False):
        outputs.append(pre_norm)
    if options.get("return_dropout_mask", False):
        outputs.append(mask)
    return out if len(outputs) == 1 else tuple(outputs)


def _dropout_add(
    x0: Tensor, residual: Tensor | None, dropout_p: float, options: DropoutAddNormOptions
) -> tuple[Tensor, Tensor]:
    value = _upcast(x0)
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


def _upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> None:
    """Raise ValueError if gamma does not match x."""
    if not x.is_floating_point():
        raise ValueError(f"rms_norm needs a floating-point x, got {x.dtype}")
    if gamma.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm needs a gamma of shape {tuple(x.shape[-1:])} for x of shape "
            f"{tuple(x.shape)}, got {tuple(gamma.shape)}"
        )


def check_add_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> None:
    """Raise ValueError if the residual or gamma does not match x."""
    if residual.shape != x.shape:
        raise ValueError(
            f"add_rms_norm needs a residual of shape {tuple(x.shape)}, got {tuple(residual.shape)}"
        )
    check_rms_norm(x, gamma, epsilon)


def check_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float = 1e-5) -> None:
    """Raise ValueError if weight or bias does not match x."""
    if not x.is_floating_point():
        raise ValueError(f"layer_norm needs a floating-point x, got {x.dtype}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"layer_norm needs a {name} of shape {tuple(x.shape[-1:])} for x of shape "
                f"{tuple(x.shape)}, got {tuple(parameter.shape)}"
            )


def check_dropout_add_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    **options: Any,
) -> None:
    """Raise ValueError for tensors that do not match x0 and for an invalid dropout probability."""
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p}: use a probability from 0 to below 1")
    expected = {
        "residual": (residual, x0.shape),
        "weight": (weight, x0.shape[-1:]),
        "bias": (bias, x0.shape[-1:]),
        "rowscale": (options.get("rowscale"), x0.shape[:-1]),
        "layerscale": (options.get("layerscale"), x0.shape[-1:]),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} must have shape {tuple(shape)} for x0 of shape {tuple(x0.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
