"""Feed-forward layer on Ascend, as torch-npu 2.13.0 declares it:

npu_ffn(Tensor x, Tensor weight1, Tensor weight2, str activation, *, int[]? expert_tokens=None,
int[]? expert_tokens_index=None, Tensor? bias1=None, Tensor? bias2=None, Tensor? scale=None,
Tensor? offset=None, Tensor? deq_scale1=None, Tensor? deq_scale2=None,
Tensor? antiquant_scale1=None, Tensor? antiquant_scale2=None, Tensor? antiquant_offset1=None,
Tensor? antiquant_offset2=None, int? inner_precise=None, ScalarType? output_dtype=None) -> Tensor
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_npu
from torch import Tensor


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
    """Run the layer on x (..., K1)."""
    return torch_npu.npu_ffn(
        x,
        weight1,
        weight2,
        activation,
        expert_tokens=_numbers(expert_tokens),
        expert_tokens_index=_numbers(expert_tokens_index),
        bias1=bias1,
        bias2=bias2,
        scale=scale,
        offset=offset,
        deq_scale1=deq_scale1,
        deq_scale2=deq_scale2,
        antiquant_scale1=antiquant_scale1,
        antiquant_scale2=antiquant_scale2,
        antiquant_offset1=antiquant_offset1,
        antiquant_offset2=antiquant_offset2,
        inner_precise=inner_precise,
        output_dtype=output_dtype,
    )


def _numbers(values: Sequence[int] | Tensor | None) -> Sequence[int] | None:
    """Return a list of integers, which the kernel takes."""
    return values.tolist() if isinstance(values, Tensor) else values
