"""What dropout + add + norm accepts and returns, whichever implementation runs."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor


class Options(TypedDict, total=False):
    """The keywords that both norms share."""

    rowscale: Tensor | None
    layerscale: Tensor | None
    prenorm: bool
    residual_in_fp32: bool
    return_dropout_mask: bool


def check(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    **options: Any,
) -> None:
    """Raise ValueError for tensors that do not fit x0, and for a probability that is none."""
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


def sum_dtype(x0: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> torch.dtype:
    """Return the type of what is normalised: the residual's, or the one asked for."""
    if residual is not None:
        return residual.dtype
    return torch.float32 if residual_in_fp32 else x0.dtype


def results(
    out: Tensor, pre_norm: Tensor, mask: Tensor | None, options: Options
) -> Tensor | tuple[Tensor | None, ...]:
    """Return the norm, then what was normalised and the mask as far as they were asked for."""
    answer: list[Tensor | None] = [out]
    if options.get("prenorm", False):
        answer.append(pre_norm)
    if options.get("return_dropout_mask", False):
        answer.append(mask)
    return out if len(answer) == 1 else tuple(answer)
