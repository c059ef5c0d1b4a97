"""RMSNorm: x / rms(x) * weight over the last dimension."""

from mindspeed.ops.dispatch import Impl, Op

rms_norm = Op(
    "rms_norm",
    reference="mindspeed.ops.rms_norm.reference:rms_norm",
    impls=(
        Impl("npu", "mindspeed.ops.rms_norm.npu_impl:rms_norm", device="npu", needs=("torch_npu",)),
    ),
)
