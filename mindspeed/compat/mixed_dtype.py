"""Let Megatron's local layers work on tensors of different floating types.

A bare GPTModel with `params_dtype=torch.float16` has float32 norms and positions beside float16
weights. An NPU multiplies the two; cpu and cuda refuse, so both are promoted first.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

_OPERANDS = ("input", "weight", "bias")


def promote(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a linear function of Megatron so that operands of mixed types meet in the wider one."""

    @functools.wraps(original)
    def linear(*args: Any, **kwargs: Any) -> torch.Tensor:
        operands = dict(zip(_OPERANDS, args)) | {n: kwargs[n] for n in _OPERANDS if n in kwargs}
        if operands["input"].dtype == operands["weight"].dtype:
            return original(*args, **kwargs)
        wider = torch.promote_types(operands["input"].dtype, operands["weight"].dtype)
        _say_once(operands["input"].dtype, operands["weight"].dtype, wider)
        met = {n: t if t is None else t.to(wider) for n, t in operands.items()}
        positional = [met.pop(n) for n, _ in zip(_OPERANDS, args)]
        return original(*positional, *args[len(_OPERANDS) :], **(kwargs | met))

    return linear


def keep_type(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap Megatron's masked softmax so that probabilities have the type of the scores."""

    @functools.wraps(original)
    def forward(self: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return original(self, input, *args, **kwargs).to(input.dtype)

    return forward


@functools.cache
def _say_once(given: torch.dtype, weight: torch.dtype, wider: torch.dtype) -> None:
    logger.warning(
        "linear layers got %s inputs for %s weights and compute in %s; "
        "get_model() casts the whole model to one type",
        *(str(dtype).removeprefix("torch.") for dtype in (given, weight, wider)),
    )
