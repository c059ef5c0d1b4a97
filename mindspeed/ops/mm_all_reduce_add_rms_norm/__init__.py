"""Row-parallel product, all-reduce, residual and RMSNorm in one call."""

from mindspeed.ops.dispatch import Impl, Op

_NAME = "mm_all_reduce_add_rms_norm"
_ROOM = f"mindspeed.ops.{_NAME}"

mm_all_reduce_add_rms_norm = Op(
    _NAME,
    reference=f"{_ROOM}.reference:{_NAME}",
    impls=(Impl("npu", f"{_ROOM}.npu_impl:{_NAME}", device="npu", needs=("torch_npu",)),),
    check=f"{_ROOM}.reference:check",
)

mm_all_reduce_add_rms_norm_ = Op(
    _NAME,
    reference=f"{_ROOM}.reference:{_NAME}_",
    impls=(Impl("npu", f"{_ROOM}.npu_impl:{_NAME}_", device="npu", needs=("torch_npu",)),),
    check=f"{_ROOM}.reference:check",
)
