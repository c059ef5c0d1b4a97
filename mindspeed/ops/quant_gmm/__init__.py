"""Grouped products of int8 rows and int8 matrices, scaled to a float type or to int8 again."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.quant_gmm"

quant_gmm = Op(
    "quant_gmm",
    reference=f"{_ROOM}.reference:quant_gmm",
    impls=(Impl("triton", f"{_ROOM}.triton_impl:quant_gmm", device="cuda", needs=("triton",)),),
    check=f"{_ROOM}.reference:check",
)
quant_gmm_v2 = Op(
    "quant_gmm",
    reference=f"{_ROOM}.reference:quant_gmm_v2",
    impls=(Impl("triton", f"{_ROOM}.triton_impl:quant_gmm_v2", device="cuda", needs=("triton",)),),
    check=f"{_ROOM}.reference:check",
)
