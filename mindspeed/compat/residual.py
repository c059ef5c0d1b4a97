"""The sum of a layer's output and its residual."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

Pair = tuple[Tensor, Tensor | None]
Add = Callable[[Pair, Tensor, float], Tensor]


def wrap_get_bias_dropout_add(original: Callable[..., Add]) -> Callable[..., Add]:
    """Hand out a sum that falls back on Megatron's function for a bias or a dropout."""

    @functools.wraps(original)
    def get_bias_dropout_add(training: bool, *args: Any, **kwargs: Any) -> Add:
        fused = original(training, *args, **kwargs)

        def add(x_with_bias: Pair, residual: Tensor, prob: float) -> Tensor:
            x, bias = x_with_bias
            is_plain = bias is None and not (training and prob) and x.requires_grad
            # Which of two types the sum has depends on the version of Megatron.
            if not is_plain or x.dtype != residual.dtype:
                return fused(x_with_bias, residual, prob)
            return residual + x

        return add

    return get_bias_dropout_add
