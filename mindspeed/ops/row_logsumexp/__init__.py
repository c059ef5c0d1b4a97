"""The logarithm of the sum of exponentials of each row, as a router's z-loss needs it."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.row_logsumexp"

row_logsumexp = Op(
    "row_logsumexp",
    reference=f"{_PACKAGE}.reference:row_logsumexp",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:row_logsumexp", device="cuda", needs=("triton",)),
    ),
    check=f"{_PACKAGE}.reference:check",
)
