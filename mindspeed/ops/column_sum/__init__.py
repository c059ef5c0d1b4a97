"""Sum of the columns of a matrix: the gradient of a bias."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.column_sum"

column_sum = Op(
    "column_sum",
    reference=f"{_ROOM}.reference:column_sum",
    impls=(Impl("triton", f"{_ROOM}.triton_impl:column_sum", device="cuda", needs=("triton",)),),
    check=f"{_ROOM}.reference:check",
)
