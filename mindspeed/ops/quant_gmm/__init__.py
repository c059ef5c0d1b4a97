"""Grouped GEMMs of quantised tensors: int8 by int8, and floating point by int8."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.quant_gmm"

quant_gmm = Op(
    "quant_gmm",
    reference=f"{_PACKAGE}.reference:quant_gmm",
    impls=(Impl("triton", f"{_PACKAGE}.triton_impl:quant_gmm", device="cuda", needs=("triton",)),),
    check=f"{_PACKAGE}.reference:check_quant_gmm",
)
quant_gmm_v2 = Op(
    "quant_gmm",
    reference=f"{_PACKAGE}.reference:quant_gmm_v2",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:quant_gmm_v2", device="cuda", needs=("triton",)),
    ),
    check=f"{_PACKAGE}.reference:check_quant_gmm",
)
weight_quant_gmm = Op(
    "weight_quant_gmm",
    reference=f"{_PACKAGE}.reference:weight_quant_gmm",
    impls=(
        # The reference calls gmm, which runs torch's grouped GEMM there.
        Impl("grouped_mm", f"{_PACKAGE}.reference:weight_quant_gmm", device="cuda"),
    ),
    check=f"{_PACKAGE}.reference:check_weight_quant_gmm",
)
