"""Weight gradient of a linear layer, added to a float32 buffer without rounding the product."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.matmul_add_fp32"

matmul_add_fp32 = Op(
    "matmul_add_fp32",
    reference=f"{_ROOM}.reference:matmul_add_fp32",
    impls=(
        Impl("cublas", f"{_ROOM}.cuda_impl:matmul_add_fp32", device="cuda"),
        Impl("npu", f"{_ROOM}.npu_impl:matmul_add_fp32", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_ROOM}.reference:check",
)
