"""Several products, each summed over the ranks while the next one is multiplied."""

from mindspeed.ops.dispatch import Op

_ROOM = "mindspeed.ops.grouped_mat_mul_all_reduce"

grouped_mat_mul_all_reduce = Op(
    "grouped_mat_mul_all_reduce",
    reference=f"{_ROOM}.reference:grouped_mat_mul_all_reduce",
    check=f"{_ROOM}.reference:check",
)
