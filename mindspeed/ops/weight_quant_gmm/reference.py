"""y_g = act(x_g @ ((W_g + antiquant_offset_g) * antiquant_scale_g) + bias_g), W of int8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops.gmm import gmm
from mindspeed.ops.quant_gmm.reference import ACTIVATIONS


def weight_quant_gmm(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor,
    *,
    bias: Tensor | None = None,
    group_list: Tensor | Sequence[int] | None = None,
    act_type: int = 0,
) -> Tensor:
    """Multiply groups of rows by widened int8 matrices.

    Args:
        x: (M, K) of a float type
        weight: (E, K, N) int8
        antiquant_scale: (E, N) or (E, 1)
        antiquant_offset: like the scale
        bias: (E, N)
        group_list: the end of each group
        act_type: 0 none, 1 relu, 2 gelu (tanh), 4 fast gelu, 5 silu
    """
    matrices = widen(weight, antiquant_scale, antiquant_offset).to(x.dtype)
    out: Tensor = gmm(x, matrices, bias=bias, group_list=group_list)
    return ACTIVATIONS[act_type](out)


def widen(weight: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """Return (weight + offset) * scale in the type of scale, one number a column."""
    columns = (*weight.shape[:-2], 1, -1)
    wide = weight.to(scale.dtype)
    if offset is not None:
        wide = wide + offset.view(columns)
    return wide * scale.view(columns)


def check(
    x: Tensor, weight: Tensor, antiquant_scale: Tensor, antiquant_offset: Tensor, **options: Any
) -> None:
    """Refuse what does not fit together."""
    if weight.dtype != torch.int8 or not x.is_floating_point():
        raise ValueError(
            f"weight_quant_gmm multiplies a float x by int8 matrices, got {x.dtype} and "
            f"{weight.dtype}"
        )
    if options.get("act_type", 0) not in ACTIVATIONS:
        raise ValueError(f"act_type={options['act_type']}: use {', '.join(map(str, ACTIVATIONS))}")
