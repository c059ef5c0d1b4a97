"""The experts' second product, and tokens back from them over two process groups."""

from mindspeed.ops.dispatch import Op

_ROOM = "mindspeed.ops.bmm_reduce_scatter_all_to_all"

bmm_reduce_scatter_all_to_all = Op(
    "bmm_reduce_scatter_all_to_all",
    reference=f"{_ROOM}.reference:bmm_reduce_scatter_all_to_all",
    check=f"{_ROOM}.reference:check",
)
