"""Dispatch tokens to experts over two process groups, and run the experts' first GEMM."""

from mindspeed.ops.dispatch import Op

_PACKAGE = "mindspeed.ops.all_to_all_all_gather_bmm"

all_to_all_all_gather_bmm = Op(
    "all_to_all_all_gather_bmm",
    reference=f"{_PACKAGE}.reference:all_to_all_all_gather_bmm",
    check=f"{_PACKAGE}.reference:check",
)
