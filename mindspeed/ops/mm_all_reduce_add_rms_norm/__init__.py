"""Row-parallel product, all-reduce, residual and RMSNorm in one call, and over the residual."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.mm_all_reduce_add_rms_norm"

mm_all_reduce_add_rms_norm, mm_all_reduce_add_rms_norm_ = (
    Op(
        name,
        reference=f"{_ROOM}.reference:{name}",
        impls=(Impl("npu", f"{_ROOM}.npu_impl:{name}", device="npu", needs=("torch_npu",)),),
        check=f"{_ROOM}.reference:check",
    )
    for name in ("mm_all_reduce_add_rms_norm", "mm_all_reduce_add_rms_norm_")
)
