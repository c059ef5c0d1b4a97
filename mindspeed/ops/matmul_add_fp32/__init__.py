"""Weight gradient of a linear layer, accumulated in float32 without intermediate rounding."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.matmul_add_fp32"

matmul_add_fp32 = Op(
    "matmul_add_fp32",
    reference=f"{_PACKAGE}.reference:matmul_add_fp32",
    impls=(
        Impl("cublas", f"{_PACKAGE}.cuda_impl:matmul_add_fp32", device="cuda"),
        Impl("npu", f"{_PACKAGE}.npu_impl:matmul_add_fp32", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_PACKAGE}.reference:check",
)
