"""y = act(x W1 + bias1) W2 + bias2 in plain torch.

Quantised: ((act((x W1 + bias1) * deq_scale1) * scale + offset) W2 + bias2) * deq_scale2 for int8 x,
W1 and W2; the input of the second GEMM is rounded to int8. Weight only: an int8 W is
(W + antiquant_offset) * antiquant_scale. With experts, W1 (E, K1, N1) and W2 (E, K2, N2) are those
of consecutive groups of rows, and biases, scales and offsets have a row for each expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops.gmm import gmm
from mindspeed.ops.gmm.reference import Grouping
from mindspeed.ops.quant_gmm.reference import dequantise, per_row

UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "fastgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}
GATED: dict[str, Callable[[Tensor], Tensor]] = {"geglu": F.gelu, "swiglu": F.silu, "reglu": F.relu}
_MAX_EXPERTS = 256


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
        expert_tokens_index: the end of each expert's rows, instead of their counts
        bias1: (N1,) or (E, N1); bias2 likewise
        scale: one number or (N1,), with experts (E,) or (E, N1); offset likewise
        deq_scale1: one number or (N1,), with experts (E,) or (E, N1); deq_scale2 likewise
        antiquant_scale1: of an int8 weight1 for a float x, like deq_scale1; the others likewise
        inner_precise: accepted for compatibility; sums are never less than float32
        output_dtype: of a quantised layer, float16 by default
    """
    rows = x.reshape(-1, x.shape[-1])
    ends = _ends(expert_tokens, expert_tokens_index, x.device)
    matmul = _matmul if ends is None else functools.partial(gmm, group_list=ends)
    if x.dtype == torch.int8:
        total = matmul(rows.double(), weight1.double(), bias=_to_double(bias1))
        hidden = _activate(_scaled(total, deq_scale1, None, ends), activation)
        hidden = _scaled(hidden, scale, offset, ends).round().clamp(-128, 127)
        out = matmul(hidden, weight2.double(), bias=_to_double(bias2))
        out = _scaled(out, deq_scale2, None, ends).to(output_dtype or torch.float16)
    else:
        is_quantised = weight1.dtype == torch.int8
        if is_quantised and antiquant_scale1 is not None and antiquant_scale2 is not None:
            weight1 = dequantise(weight1, antiquant_scale1, antiquant_offset1).to(x.dtype)
            weight2 = dequantise(weight2, antiquant_scale2, antiquant_offset2).to(x.dtype)
        hidden = _activate(matmul(rows, weight1, bias=bias1), activation)
        out = matmul(hidden, weight2, bias=bias2)
    return out.view(*x.shape[:-1], weight2.shape[-1])


def _ends(
    counts: Sequence[int] | Tensor | None,
    index: Sequence[int] | Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Return the end of each expert's rows."""
    if counts is None and index is None:
        return None
    return Grouping(index if counts is None else counts, counts is None, 0, None).ends(device)


def _scaled(x: Tensor, scale: Tensor | None, offset: Tensor | None, ends: Tensor | None) -> Tensor:
    """Return x * scale + offset of each row's expert."""

    def per_expert(value: Tensor) -> Tensor:
        return value if ends is None or value.numel() == 1 else per_row(value, ends, len(x))

    x = x if scale is None else x * per_expert(scale)
    return x if offset is None else x + per_expert(offset)


def _matmul(x: Tensor, weight: Tensor, *, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else torch.addmm(bias.reshape(-1), x, weight)


def _to_double(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.double()


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation in UNGATED:
        return UNGATED[activation](x)
    gate, up = x.chunk(2, dim=-1)
    return GATED[activation](gate) * up


def check(x: Tensor, weight1: Tensor, weight2: Tensor, activation: str, **options: Any) -> None:
    """Raise ValueError for arguments that do not match."""
    counts, index = options.get("expert_tokens"), options.get("expert_tokens_index")
    if counts is not None and index is not None:
        raise ValueError("ffn takes expert_tokens or expert_tokens_index, not both")
    groups = index if counts is None else counts
    allowed = [*UNGATED, *(GATED if groups is None else ())]
    if activation not in allowed:
        where = "without" if groups is None else "with"
        raise ValueError(f"activation={activation!r}: {where} experts use {', '.join(allowed)}")
    dims = 2 if groups is None else 3
    if weight1.ndim != dims or weight2.ndim != dims:
        raise ValueError(
            f"ffn needs weights of {dims} dimensions here, got {weight1.ndim} and {weight2.ndim}"
        )
    if groups is not None and not len(groups) == len(weight1) <= _MAX_EXPERTS:
        raise ValueError(
            f"ffn has {len(weight1)} experts and {len(groups)} counts: equally many, and at most "
            f"{_MAX_EXPERTS}, are needed"
        )
    _check_types(x, weight1, weight2, options)
    inner = weight2.shape[-2] * (2 if activation in GATED else 1)
    if x.shape[-1] != weight1.shape[-2] or weight1.shape[-1] != inner:
        raise ValueError(
            f"ffn cannot chain {tuple(x.shape)}, {tuple(weight1.shape)} and "
            f"{tuple(weight2.shape)} by {activation}"
        )


def _check_types(x: Tensor, weight1: Tensor, weight2: Tensor, options: dict[str, Any]) -> None:
    types = {weight1.dtype, weight2.dtype}
    if len(types) > 1 or (x.dtype == torch.int8 and torch.int8 not in types):
        raise ValueError(
            f"ffn needs two weights of one dtype, int8 for an int8 x, got {x.dtype}, "
            f"{weight1.dtype} and {weight2.dtype}"
        )
    scales = options.get("antiquant_scale1"), options.get("antiquant_scale2")
    if x.dtype != torch.int8 and torch.int8 in types and any(scale is None for scale in scales):
        raise ValueError("ffn with int8 weights needs antiquant_scale1 and antiquant_scale2")
