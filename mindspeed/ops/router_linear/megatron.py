"""Wraps the GEMM of Megatron's routers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops.router_linear import router_linear


def wrap_gating(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute scores in float32 by the operator; other dtypes of a router fall back to Megatron."""

    @functools.wraps(original)
    def gating(self: Any, input: Tensor) -> Tensor:
        weight, is_fp32 = self.weight, self.config.moe_router_dtype == "fp32"
        is_served = input.dtype == weight.dtype == torch.bfloat16 and input.device == weight.device
        if not (is_fp32 and is_served):
            return original(self, input)
        scores: Tensor = router_linear(input, weight)
        bias: Tensor | None = getattr(self, "bias", None)
        return scores if bias is None else scores + bias.to(scores.dtype)

    return gating
