"""y = act(x W1 + bias1) W2 + bias2 in plain torch.

Quantised: ((act((x W1 + bias1) * deq_scale1) * scale + offset) W2 + bias2) * deq_scale2 for int8 x,
W1 and W2; what enters the second product is rounded to int8. Weight only: an int8 W is
(W + antiquant_offset) * antiquant_scale. With experts, W1 (E, K1, N1) and W2 (E, K2, N2) are those
of consecutive groups of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops.gmm import gmm, gmm_v2
from mindspeed.ops.weight_quant_gmm.reference import widen

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "fastgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}
GATED = {"geglu": F.gelu, "swiglu": F.silu, "reglu": F.relu}
_MOST_EXPERTS = 256


def ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    expert_tokens: Sequence[int] | Tensor | None = None,
    expert_tokens_index: Sequence[int] | Tensor | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    deq_scale1: Tensor | None = None,
    deq_scale2: Tensor | None = None,
    antiquant_scale1: Tensor | None = None,
    antiquant_scale2: Tensor | None = None,
    antiquant_offset1: Tensor | None = None,
    antiquant_offset2: Tensor | None = None,
    inner_precise: int | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run the layer on x (..., K1).

    Args:
        weight1: (K1, N1), with experts (E, K1, N1)
        weight2: (K2, N2), with experts (E, K2, N2); N1 = K2, twice that for gated activations
        activation: fastgelu, gelu, relu, silu; without experts also geglu, swiglu, reglu
        expert_tokens: the number of rows of each expert
        expert_tokens_index: the end of each expert's rows, instead of their numbers
        bias1: (N1,) or (E, N1); bias2 likewise
        inner_precise: accepted for the sake of callers; sums are never less than float32
        output_dtype: of a quantised layer, float16 by default
    """
    rows = x.reshape(-1, x.shape[-1])
    multiply: Callable[..., Tensor] = _whole
    if expert_tokens is not None:
        multiply = functools.partial(gmm_v2, group_list=expert_tokens)
    elif expert_tokens_index is not None:
        multiply = functools.partial(gmm, group_list=expert_tokens_index)
    if x.dtype == torch.int8:
        total = multiply(rows.double(), weight1.double(), bias=_wide(bias1))
        hidden = _activate(total if deq_scale1 is None else total * deq_scale1, activation)
        hidden = hidden if scale is None else hidden * scale
        hidden = (hidden if offset is None else hidden + offset).round().clamp(-128, 127)
        out = multiply(hidden, weight2.double(), bias=_wide(bias2))
        out = (out if deq_scale2 is None else out * deq_scale2).to(output_dtype or torch.float16)
        return out.view(*x.shape[:-1], -1)
    if weight1.dtype == torch.int8:
        weight1 = widen(weight1, antiquant_scale1, antiquant_offset1).to(x.dtype)
        weight2 = widen(weight2, antiquant_scale2, antiquant_offset2).to(x.dtype)
    hidden = _activate(multiply(rows, weight1, bias=bias1), activation)
    return multiply(hidden, weight2, bias=bias2).view(*x.shape[:-1], -1)


def _whole(x: Tensor, weight: Tensor, *, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else torch.addmm(bias.reshape(-1), x, weight)


def _wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.double()


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation in PLAIN:
        return PLAIN[activation](x)
    gate, up = x.chunk(2, dim=-1)
    return GATED[activation](gate) * up


def check(x: Tensor, weight1: Tensor, weight2: Tensor, activation: str, **options: Any) -> None:
    """Refuse what does not fit together."""
    counts, index = options.get("expert_tokens"), options.get("expert_tokens_index")
    if counts is not None and index is not None:
        raise ValueError("ffn takes expert_tokens or expert_tokens_index, not both")
    groups = index if counts is None else counts
    allowed = [*PLAIN, *(GATED if groups is None else ())]
    if activation not in allowed:
        where = "without" if groups is None else "with"
        raise ValueError(f"activation={activation!r}: {where} experts use {', '.join(allowed)}")
    dims = 2 if groups is None else 3
    if weight1.ndim != dims or weight2.ndim != dims:
        raise ValueError(
            f"ffn needs weights of {dims} dimensions here, got {weight1.ndim} and {weight2.ndim}"
        )
    if groups is not None and not len(groups) == len(weight1) <= _MOST_EXPERTS:
        raise ValueError(
            f"ffn has {len(weight1)} experts and {len(groups)} counts: equally many, and at most "
            f"{_MOST_EXPERTS}, are needed"
        )
    inner = weight2.shape[-2] * (2 if activation in GATED else 1)
    if x.shape[-1] != weight1.shape[-2] or weight1.shape[-1] != inner:
        raise ValueError(
            f"ffn cannot chain {tuple(x.shape)}, {tuple(weight1.shape)} and "
            f"{tuple(weight2.shape)} by {activation}"
        )
