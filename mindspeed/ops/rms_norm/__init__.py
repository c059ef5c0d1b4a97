"""RMSNorm: x / rms(x) * gamma over the last dimension, alone and after adding a residual."""

from mindspeed.ops.dispatch import Impl, Op

rms_norm = Op(
    "rms_norm",
    reference="mindspeed.ops.rms_norm.reference:rms_norm",
    check="mindspeed.ops.rms_norm.contract:check_rms_norm",
    impls=(
        Impl("triton", "mindspeed.ops.rms_norm.triton_impl:rms_norm", "cuda", ("triton",)),
        Impl("npu", "mindspeed.ops.rms_norm.npu_impl:rms_norm", "npu", ("torch_npu",)),
    ),
)
add_rms_norm = Op(
    "add_rms_norm",
    reference="mindspeed.ops.rms_norm.reference:add_rms_norm",
    check="mindspeed.ops.rms_norm.contract:check_add_rms_norm",
    impls=(
        Impl("triton", "mindspeed.ops.rms_norm.triton_impl:add_rms_norm", "cuda", ("triton",)),
        Impl("npu", "mindspeed.ops.rms_norm.npu_impl:add_rms_norm", "npu", ("torch_npu",)),
    ),
)
