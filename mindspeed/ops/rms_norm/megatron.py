"""Puts the RMSNorm operator behind the norm of Megatron's local layer specs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mindspeed.ops.rms_norm import rms_norm


class FusedRMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm through our operator: same weight, same name in checkpoints."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        # Megatron sums this gradient over the ranks that share the sequence.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps)


def wrap_wrapped_torch_norm_new(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build a FusedRMSNorm where the model is normalised by RMSNorm; the rest is not ours."""

    @functools.wraps(original)
    def __new__(  # noqa: N807 (it replaces the one of a class)
        cls: type,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> Any:
        if config.normalization == "RMSNorm" and not config.layernorm_zero_centered_gamma:
            return FusedRMSNorm(config, hidden_size, eps)
        rest = (persist_layer_norm, zero_centered_gamma, normalization)
        return original(cls, config, hidden_size, eps, *rest)

    return __new__
