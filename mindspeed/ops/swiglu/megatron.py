"""SwiGLU in place of Megatron's own fused functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed.ops.swiglu import swiglu


def wrap_bias_swiglu_impl(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute `bias_swiglu_impl` by the operator; storing the input elsewhere stays Megatron's."""

    @functools.wraps(original)
    def bias_swiglu_impl(
        input: Tensor, bias: Tensor | None, fp8_input_store: bool = False, *args: Any, **kwargs: Any
    ) -> Tensor:
        if fp8_input_store or any(args) or any(kwargs.values()):
            return original(input, bias, fp8_input_store, *args, **kwargs)
        return swiglu(input, bias=bias)

    return bias_swiglu_impl


def wrap_weighted_bias_swiglu_impl(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute `weighted_bias_swiglu_impl`, which experts call with one factor a token."""

    @functools.wraps(original)
    def weighted_bias_swiglu_impl(
        input: Tensor, bias: Tensor | None, weights: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if bias is not None or any(args) or any(kwargs.values()):
            return original(input, bias, weights, *args, **kwargs)
        return swiglu(input, weights=weights.view(*input.shape[:-1], 1))

    return weighted_bias_swiglu_impl
