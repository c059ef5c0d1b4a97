"""Weight gradients of grouped products, added to float32 without rounding the products."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.groupmatmul_add_fp32"

groupmatmul_add_fp32 = Op(
    "groupmatmul_add_fp32",
    reference=f"{_ROOM}.reference:groupmatmul_add_fp32",
    impls=(
        Impl(
            "triton",
            f"{_ROOM}.triton_impl:groupmatmul_add_fp32",
            device="cuda",
            needs=("triton",),
        ),
        Impl("npu", f"{_ROOM}.npu_impl:groupmatmul_add_fp32", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_ROOM}.reference:check",
)
