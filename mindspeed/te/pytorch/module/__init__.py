"""Modules with weights: norms, linear layers, and the padding around grouped ones."""

from mindspeed.te.pytorch.module.fp8_padding import Fp8Padding, Fp8Unpadding
from mindspeed.te.pytorch.module.grouped_linear import GroupedLinear
from mindspeed.te.pytorch.module.layernorm import LayerNorm, RMSNorm
from mindspeed.te.pytorch.module.layernorm_linear import LayerNormLinear
from mindspeed.te.pytorch.module.layernorm_mlp import LayerNormMLP
from mindspeed.te.pytorch.module.linear import Linear

__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
]
