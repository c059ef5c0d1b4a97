"""Grouped GEMM: each group of rows of x times a matrix of its own."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.gmm"

gmm = Op(
    "gmm",
    reference=f"{_PACKAGE}.reference:gmm",
    impls=(
        Impl("grouped_mm", f"{_PACKAGE}.cuda_impl:gmm", device="cuda", needs=("triton",)),
        Impl("npu", f"{_PACKAGE}.npu_impl:gmm", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_PACKAGE}.reference:check",
)

gmm_v2 = Op(
    "gmm",
    reference=f"{_PACKAGE}.reference:gmm_v2",
    impls=(
        Impl("grouped_mm", f"{_PACKAGE}.cuda_impl:gmm_v2", device="cuda", needs=("triton",)),
        Impl("npu", f"{_PACKAGE}.npu_impl:gmm_v2", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_PACKAGE}.reference:check",
)
