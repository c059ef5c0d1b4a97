"""What ring_attention_update accepts, whichever implementation runs.

Outputs are (S, B, N * D) with statistics (B, N, S, 8) for layout SBH, and (T, N, D) with (T, N, 8)
for TND; a statistic is one number, eight times.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

LAYOUTS = ("SBH", "TND")


def check(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    **options: Any,
) -> None:
    """Raise ValueError for tensors that do not belong to one attention."""
    layout = options.get("layout", "SBH")
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout}: use {' or '.join(LAYOUTS)}")
    statistics = prev_softmax_max, prev_softmax_sum, cur_softmax_max, cur_softmax_sum
    shape = prev_softmax_max.shape
    if any(x.shape != shape for x in statistics) or cur_attn_out.shape != prev_attn_out.shape:
        raise ValueError("the previous and the current tensors must have the same shapes")
    out = prev_attn_out.shape
    is_fit = len(out) == 3 and len(shape) == (4 if layout == "SBH" else 3) and shape[-1] == 8
    if is_fit and layout == "SBH":
        is_fit = out[:2] == (shape[2], shape[0]) and out[2] % shape[1] == 0
    elif is_fit:
        is_fit = out[:2] == shape[:2]
    if not is_fit:
        raise ValueError(
            f"layout={layout}: outputs of shape {tuple(out)} do not go with statistics of shape "
            f"{tuple(shape)}"
        )


def four_dims(x: Tensor, statistic: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """View an output as (I, J, N, D), and one number a row of a statistic as (I, J, N)."""
    if layout == "SBH":
        return x.unflatten(-1, (statistic.shape[1], -1)), statistic[..., 0].permute(2, 0, 1)
    return x.unsqueeze(1), statistic[..., 0].unsqueeze(1)
