"""Run the experts' second GEMM, and combine tokens over two process groups."""

from mindspeed.ops.dispatch import Op

_PACKAGE = "mindspeed.ops.bmm_reduce_scatter_all_to_all"

bmm_reduce_scatter_all_to_all = Op(
    "bmm_reduce_scatter_all_to_all",
    reference=f"{_PACKAGE}.reference:bmm_reduce_scatter_all_to_all",
    check=f"{_PACKAGE}.reference:check",
)
