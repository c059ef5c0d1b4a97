"""Row-parallel product, all-reduce, residual and RMSNorm in one call."""

from mindspeed.ops.dispatch import Op

_ROOM = "mindspeed.ops.mm_all_reduce_add_rms_norm"

mm_all_reduce_add_rms_norm = Op(
    "mm_all_reduce_add_rms_norm",
    reference=f"{_ROOM}.reference:mm_all_reduce_add_rms_norm",
    check=f"{_ROOM}.reference:check",
)

mm_all_reduce_add_rms_norm_ = Op(
    "mm_all_reduce_add_rms_norm",
    reference=f"{_ROOM}.reference:mm_all_reduce_add_rms_norm_",
    check=f"{_ROOM}.reference:check",
)
