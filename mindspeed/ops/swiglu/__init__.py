"""SwiGLU: silu(gate) * up, with gate and up packed in the last dimension of one tensor."""

from mindspeed.ops.dispatch import Impl, Op

swiglu = Op(
    "swiglu",
    reference="mindspeed.ops.swiglu.reference:swiglu",
    impls=(
        Impl("npu", "mindspeed.ops.swiglu.npu_impl:swiglu", device="npu", needs=("torch_npu",)),
    ),
)
