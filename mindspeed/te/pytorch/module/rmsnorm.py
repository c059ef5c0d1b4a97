"""RMSNorm with Megatron's parameter marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from mindspeed.te.pytorch.module.base import activation_dtype
from mindspeed.te.pytorch.module.layernorm import Norm
from mindspeed.te.pytorch.module.normalize import add_rms_norm, rms_norm

if TYPE_CHECKING:
    from mindspeed.te.fused_residual_norm import ResidualNorm


class RMSNorm(Norm):
    """Root-mean-square norm, computed in float32 at least."""

    has_bias = False
    residual_norm: ResidualNorm | None = None
    """Where the residual sum before this module computes the norm along with it."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimensions of x."""
        normed = None if self.residual_norm is None else self.residual_norm.take(x)
        return rms_norm(x, self.weight, self.eps, **self._types(x)) if normed is None else normed

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the norm of x + residual and the sum, by one kernel; None where there is none."""
        return add_rms_norm(x, residual, self.weight, self.eps, **self._types(x))

    def _types(self, x: Tensor) -> dict[str, Any]:
        dtype = activation_dtype(x, self.weight)
        return {"zero_centered": self.zero_centered_gamma, "dtype": dtype}
