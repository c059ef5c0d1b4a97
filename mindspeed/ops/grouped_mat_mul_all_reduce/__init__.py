"""Several GEMMs, each all-reduced while the next one runs."""

from mindspeed.ops.dispatch import Op

_PACKAGE = "mindspeed.ops.grouped_mat_mul_all_reduce"

grouped_mat_mul_all_reduce = Op(
    "grouped_mat_mul_all_reduce",
    reference=f"{_PACKAGE}.reference:grouped_mat_mul_all_reduce",
    check=f"{_PACKAGE}.reference:check",
)
