"""RMSNorm with Megatron's parameter marks."""

from __future__ import annotations

from torch import Tensor

from mindspeed.te.pytorch.module.base import activation_dtype
from mindspeed.te.pytorch.module.layernorm import Norm
from mindspeed.te.pytorch.module.normalize import rms_norm


class RMSNorm(Norm):
    """Root-mean-square norm, computed in float32 at least."""

    has_bias = False

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimensions of x."""
        return rms_norm(
            x,
            self.weight,
            self.eps,
            zero_centered=self.zero_centered_gamma,
            dtype=activation_dtype(x, self.weight),
        )
