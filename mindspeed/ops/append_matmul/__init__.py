"""A matrix with its matmul by a few rows appended, as adapters inside a GEMM need it."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.append_matmul"

append_matmul = Op(
    "append_matmul",
    reference=f"{_PACKAGE}.reference:append_matmul",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:append_matmul", device="cuda", needs=("triton",)),
    ),
    check=f"{_PACKAGE}.reference:check",
)
