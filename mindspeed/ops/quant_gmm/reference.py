"""Quantised grouped GEMMs in plain torch.

quant_gmm, forward only: y = act((x_g @ W_g + bias_g) * scale_g * per_token_scale) of int8 x and W.
The GEMM is exact (in float64), and y is rounded once, to the dtype of the output. An int8 output is
round(... + offset) clamped to -128 and 127.
weight_quant_gmm: y = act(x_g @ ((W_g + antiquant_offset_g) * antiquant_scale_g) + bias_g), W int8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops.gmm import gmm
from mindspeed.ops.gmm.reference import LOOP, Grouping

ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda x: x,
    1: F.relu,
    2: lambda x: F.gelu(x, approximate="tanh"),
    4: lambda x: x * torch.sigmoid(1.702 * x),
    5: F.silu,
}


def make_operators(
    matmul: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return quant_gmm (group_list holds ends) and quant_gmm_v2 (group_list holds sizes).

    `matmul` takes x (M, K), weight (E, K, N) and ends, and returns exact sums (M, N).
    """

    def make(is_cumulative: bool) -> Callable[..., Tensor]:
        def run(
            x: Tensor,
            weight: Tensor,
            scale: Tensor,
            *,
            offset: Tensor | None = None,
            per_token_scale: Tensor | None = None,
            bias: Tensor | None = None,
            group_list: Tensor | Sequence[int] | None = None,
            output_dtype: torch.dtype | None = None,
            act_type: int = 0,
        ) -> Tensor:
            """Compute the grouped GEMM of int8 tensors.

            Args:
                x: (M, K) int8
                weight: (E, K, N) int8
                scale: (E, N) or (E, 1); float32, bfloat16, or for an int8 result int64 whose low
                    half has the bits of a float32.
                offset: like scale, for an int8 result.
                per_token_scale: (M,) float32
                bias: (E, N) int32
                group_list: the end of each group; in quant_gmm_v2 its size.
                output_dtype: float16, bfloat16 or int8; by default bfloat16 for a bfloat16 scale,
                    int8 for an int64 one and float16 otherwise.
                act_type: 0 none, 1 relu, 2 gelu (tanh), 4 fast gelu, 5 silu.
            """
            ends = Grouping(group_list, is_cumulative, 0, None).ends(x.device)
            total = matmul(x, weight, ends).double()
            if bias is not None:
                total += per_row(bias, ends, len(x))
            if scale.dtype == torch.int64:
                total *= per_row(scale.to(torch.int32).view(torch.float32), ends, len(x))
            else:
                total *= per_row(scale, ends, len(x))
            dtype = _output_dtype(scale, output_dtype)
            return _epilogue(total, ends, offset, per_token_scale, act_type, dtype)

        return run

    return make(True), make(False)


def exact_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the exact grouped GEMM of int8 tensors, as integers in float64."""
    return LOOP.rows(x.double(), weight.double(), ends)


def exact_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Return the exact GEMM of int8 matrices, as integers in float64."""
    return x.double() @ y.double()


def _epilogue(
    total: Tensor,
    ends: Tensor,
    offset: Tensor | None,
    per_token_scale: Tensor | None,
    act_type: int,
    dtype: torch.dtype,
) -> Tensor:
    if dtype == torch.int8:
        shifted = total if offset is None else total + per_row(offset, ends, len(total))
        return shifted.round().clamp(-128, 127).to(torch.int8)
    if per_token_scale is not None:
        total = total * per_token_scale.view(-1, 1)
    return ACTIVATIONS[act_type](total).to(dtype)


def per_row(values: Tensor, ends: Tensor, num_rows: int) -> Tensor:
    """Return the values (E, ...) of each row's group, one per row."""
    rows = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    group = torch.searchsorted(ends, rows, right=True)
    return values.view(len(ends), -1).index_select(0, group)


def _output_dtype(scale: Tensor, requested: torch.dtype | None) -> torch.dtype:
    by_scale = {torch.bfloat16: torch.bfloat16, torch.int64: torch.int8}
    return requested or by_scale.get(scale.dtype, torch.float16)


def check_quant_gmm(x: Tensor, weight: Tensor, scale: Tensor, **options: Any) -> None:
    """Raise ValueError for arguments that do not match."""
    if x.dtype != torch.int8 or weight.dtype != torch.int8:
        raise ValueError(f"quant_gmm multiplies int8 by int8, got {x.dtype} and {weight.dtype}")
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"quant_gmm multiplies (M, K) by (E, K, N), got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    groups, act_type = options.get("group_list"), options.get("act_type", 0)
    if groups is None or len(groups) != len(weight):
        raise ValueError(f"quant_gmm has {len(weight)} matrices and needs as many groups")
    if act_type not in ACTIVATIONS:
        raise ValueError(f"act_type={act_type}: use {', '.join(map(str, ACTIVATIONS))}")
    dtype = _output_dtype(scale, options.get("output_dtype"))
    if dtype not in (torch.float16, torch.bfloat16, torch.int8):
        raise ValueError(f"output_dtype={dtype}: use float16, bfloat16 or int8")
    if dtype == torch.int8 and (act_type or options.get("per_token_scale") is not None):
        raise ValueError("quant_gmm with an int8 result takes no act_type and no per_token_scale")


quant_gmm, quant_gmm_v2 = make_operators(exact_rows)


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
    """Compute the grouped GEMM of x with dequantised int8 matrices.

    Args:
        x: (M, K), floating point
        weight: (E, K, N) int8
        antiquant_scale: (E, N) or (E, 1)
        antiquant_offset: like the scale
        bias: (E, N)
        group_list: the end of each group
        act_type: 0 none, 1 relu, 2 gelu (tanh), 4 fast gelu, 5 silu
    """
    matrices = dequantise(weight, antiquant_scale, antiquant_offset).to(x.dtype)
    out: Tensor = gmm(x, matrices, bias=bias, group_list=group_list)
    return ACTIVATIONS[act_type](out)


def dequantise(weight: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """Return (weight + offset) * scale in the dtype of scale, one scale per column."""
    columns = (*weight.shape[:-2], 1, -1)
    values = weight.to(scale.dtype)
    if offset is not None:
        values = values + offset.view(columns)
    return values * scale.view(columns)


def check_weight_quant_gmm(
    x: Tensor, weight: Tensor, antiquant_scale: Tensor, antiquant_offset: Tensor, **options: Any
) -> None:
    """Raise ValueError for arguments that do not match."""
    if weight.dtype != torch.int8 or not x.is_floating_point():
        raise ValueError(
            f"weight_quant_gmm multiplies a float x by int8 matrices, got {x.dtype} and "
            f"{weight.dtype}"
        )
    if options.get("act_type", 0) not in ACTIVATIONS:
        raise ValueError(f"act_type={options['act_type']}: use {', '.join(map(str, ACTIVATIONS))}")
