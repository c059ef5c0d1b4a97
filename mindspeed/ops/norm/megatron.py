"""Replaces the RMSNorm that Megatron's local layer specs build."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mindspeed.ops.norm import rms_norm


class FusedRMSNorm(nn.Module):
    """Takes over the parameter and options of a torch RMSNorm and runs the fused operator."""

    def __init__(self, plain: nn.RMSNorm) -> None:
        super().__init__()
        self.weight = plain.weight
        self.eps = plain.eps
        self.zero_centered_gamma = getattr(plain, "zero_centered_gamma", False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension of x."""
        return rms_norm(x, self.weight + 1 if self.zero_centered_gamma else self.weight, self.eps)

    def extra_repr(self) -> str:
        """Show size and eps."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


def wrap_wrapped_torch_norm_new(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `WrappedTorchNorm.__new__` return a FusedRMSNorm instead of torch's RMSNorm."""

    @functools.wraps(original)
    def build(cls: type, *args: Any, **kwargs: Any) -> Any:
        norm = original(cls, *args, **kwargs)
        return FusedRMSNorm(norm) if isinstance(norm, nn.RMSNorm) else norm

    return build
