"""Grouped products with int8 matrices, which are widened first."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.weight_quant_gmm"

weight_quant_gmm = Op(
    "weight_quant_gmm",
    reference=f"{_ROOM}.reference:weight_quant_gmm",
    impls=(
        # What the reference calls, gmm, is grouped there.
        Impl("grouped_mm", f"{_ROOM}.reference:weight_quant_gmm", device="cuda"),
    ),
    check=f"{_ROOM}.reference:check",
)
