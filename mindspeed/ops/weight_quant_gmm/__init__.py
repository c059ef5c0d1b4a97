"""Grouped products with int8 matrices, which are widened first."""

from mindspeed.ops.dispatch import Op

_ROOM = "mindspeed.ops.weight_quant_gmm"

weight_quant_gmm = Op(
    "weight_quant_gmm",
    reference=f"{_ROOM}.reference:weight_quant_gmm",  # multiplies by the gmm of the device
    check=f"{_ROOM}.reference:check",
)
