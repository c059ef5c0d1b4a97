"""Weight gradients of grouped GEMMs, accumulated in float32 without intermediate rounding."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.groupmatmul_add_fp32"

groupmatmul_add_fp32 = Op(
    "groupmatmul_add_fp32",
    reference=f"{_PACKAGE}.reference:groupmatmul_add_fp32",
    impls=(
        Impl(
            "triton",
            f"{_PACKAGE}.triton_impl:groupmatmul_add_fp32",
            device="cuda",
            needs=("triton",),
        ),
        Impl(
            "npu", f"{_PACKAGE}.npu_impl:groupmatmul_add_fp32", device="npu", needs=("torch_npu",)
        ),
    ),
    check=f"{_PACKAGE}.reference:check",
)
