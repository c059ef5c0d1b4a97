"""SwiGLU: silu(gate) * up, with gate and up packed as the two halves of one tensor."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.swiglu"

swiglu = Op(
    "swiglu",
    reference=f"{_ROOM}.reference:swiglu",
    impls=(
        Impl("triton", f"{_ROOM}.triton_impl:swiglu", device="cuda", needs=("triton",)),
        Impl("npu", f"{_ROOM}.npu_impl:swiglu", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_ROOM}.reference:check",
)

swiglu_gradient = Op(
    "swiglu_gradient",
    reference=f"{_ROOM}.reference:swiglu_gradient",
    impls=(
        Impl("triton", f"{_ROOM}.triton_impl:swiglu_gradient", device="cuda", needs=("triton",)),
    ),
)
