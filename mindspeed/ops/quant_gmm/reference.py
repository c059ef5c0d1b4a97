"""Grouped products of int8 tensors in plain torch, forward only.

y = act((x_g @ W_g + bias_g) * scale_g * per_token_scale). Products and sums of int8 numbers are
exact (float64 holds them), everything is rounded once, to the type of the result. A result of int8
is round(... + offset) kept within -128 and 127.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops.gmm.contract import Grouping
from mindspeed.ops.gmm.reference import LOOP

ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda x: x,
    1: F.relu,
    2: lambda x: F.gelu(x, approximate="tanh"),
    4: lambda x: x * torch.sigmoid(1.702 * x),
    5: F.silu,
}


def operators(
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Make quant_gmm, whose group_list holds ends, and quant_gmm_v2, whose group_list holds sizes.

    `multiply` takes x (M, K), weight (E, K, N) and ends, and returns exact sums (M, N).
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
            """Multiply int8 groups.

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
            total = multiply(x, weight, ends).double()
            if bias is not None:
                total += of_rows(bias, ends, len(x))
            if scale.dtype == torch.int64:
                total *= of_rows(scale.to(torch.int32).view(torch.float32), ends, len(x))
            else:
                total *= of_rows(scale, ends, len(x))
            dtype = _result_type(scale, output_dtype)
            return _finish(total, ends, offset, per_token_scale, act_type, dtype)

        return run

    return make(True), make(False)


def exact_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply int8 groups exactly: float64 whole numbers."""
    return LOOP.rows(x.double(), weight.double(), ends)


def exact_product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply int8 matrices exactly: float64 whole numbers."""
    return x.double() @ y.double()


def _finish(
    total: Tensor,
    ends: Tensor,
    offset: Tensor | None,
    per_token_scale: Tensor | None,
    act_type: int,
    dtype: torch.dtype,
) -> Tensor:
    if dtype == torch.int8:
        shifted = total if offset is None else total + of_rows(offset, ends, len(total))
        return shifted.round().clamp(-128, 127).to(torch.int8)
    if per_token_scale is not None:
        total = total * per_token_scale.view(-1, 1)
    return ACTIVATIONS[act_type](total).to(dtype)


def of_rows(values: Tensor, ends: Tensor, num_rows: int) -> Tensor:
    """Return the values (E, ...) of each row's group."""
    rows = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    group = torch.searchsorted(ends, rows, right=True)
    return values.view(len(ends), -1).index_select(0, group)


def _result_type(scale: Tensor, asked: torch.dtype | None) -> torch.dtype:
    known = {torch.bfloat16: torch.bfloat16, torch.int64: torch.int8}
    return asked or known.get(scale.dtype, torch.float16)


def check(x: Tensor, weight: Tensor, scale: Tensor, **options: Any) -> None:
    """Refuse what does not fit together."""
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
    dtype = _result_type(scale, options.get("output_dtype"))
    if dtype not in (torch.float16, torch.bfloat16, torch.int8):
        raise ValueError(f"output_dtype={dtype}: use float16, bfloat16 or int8")
    if dtype == torch.int8 and (act_type or options.get("per_token_scale") is not None):
        raise ValueError("quant_gmm with an int8 result takes no act_type and no per_token_scale")


quant_gmm, quant_gmm_v2 = operators(exact_rows)
