"""Grouped products of int8 rows and int8 matrices, scaled to a float type or to int8 again."""

from mindspeed.ops.dispatch import Op

_ROOM = "mindspeed.ops.quant_gmm"

quant_gmm = Op(
    "quant_gmm", reference=f"{_ROOM}.reference:quant_gmm", check=f"{_ROOM}.reference:check"
)
quant_gmm_v2 = Op(
    "quant_gmm", reference=f"{_ROOM}.reference:quant_gmm_v2", check=f"{_ROOM}.reference:check"
)
