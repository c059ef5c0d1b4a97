"""Norm, two linear layers and what lies between them in one module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from mindspeed.te.pytorch.module.layernorm_linear import LayerNormLinear
from mindspeed.te.pytorch.module.linear import Linear

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}
_GATED = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu"}


class LayerNormMLP(nn.Module):
    """fc2(activation(fc1(norm(x)))); a gated activation multiplies by the second half of fc1.

    Args:
        activation: gelu, relu, silu, or one of the gated geglu, reglu, swiglu.
        options: what both linear layers share: params_dtype, device, bias.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float = 1e-5,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        **options: Any,
    ) -> None:
        super().__init__()
        if activation not in (*_PLAIN, *_GATED):
            raise ValueError(f"activation={activation!r}: use one of {[*_PLAIN, *_GATED]}")
        self._is_gated = activation in _GATED
        self._activate = _PLAIN[_GATED.get(activation, activation)]
        rows = ffn_hidden_size * (2 if self._is_gated else 1)
        norm: dict[str, Any] = {"eps": eps, "normalization": normalization}
        self.fc1 = LayerNormLinear(hidden_size, rows, **norm, **options)
        self.fc2 = Linear(ffn_hidden_size, hidden_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like x."""
        inner = self.fc1(x)
        if not self._is_gated:
            return self.fc2(self._activate(inner))
        gate, up = inner.chunk(2, dim=-1)
        return self.fc2(self._activate(gate) * up)
