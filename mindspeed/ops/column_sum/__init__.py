"""Sum of the columns of a matrix: the gradient of a bias."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.column_sum"

column_sum = Op(
    "column_sum",
    reference=f"{_PACKAGE}.reference:column_sum",
    impls=(Impl("triton", f"{_PACKAGE}.triton_impl:column_sum", device="cuda", needs=("triton",)),),
    check=f"{_PACKAGE}.reference:check",
)
