"""RMSNorm with Megatron's parameter marks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed.te.pytorch.module.base import activation_dtype
from mindspeed.te.pytorch.module.layernorm import Norm
from mindspeed.te.pytorch.module.normalize import add_rms_norm, rms_norm
from mindspeed.te.pytorch.module.residual_norm import normed_ahead


class RMSNorm(Norm):
    """Root-mean-square norm, computed in float32 at least."""

    has_bias = False

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimensions of x."""
        normed = normed_ahead(x, self)
        return rms_norm(x, self.weight, self.eps, **self._types(x)) if normed is None else normed

    def normed_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the norm of x + residual and the sum, by one kernel; None where there is none."""
        return add_rms_norm(x, residual, self.weight, self.eps, **self._types(x))

    def _types(self, x: Tensor) -> dict[str, Any]:
        dtype = activation_dtype(x, self.weight)
        return {"zero_centered": self.zero_centered_gamma, "dtype": dtype}
