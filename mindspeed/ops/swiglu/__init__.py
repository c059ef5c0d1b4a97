"""SwiGLU: silu(gate) * up, with gate and up as the two halves of one tensor, or as two."""

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

silu_mul = Op(
    "silu_mul",
    reference=f"{_ROOM}.reference:silu_mul",
    impls=(Impl("triton", f"{_ROOM}.triton_impl:silu_mul", device="cuda", needs=("triton",)),),
    check=f"{_ROOM}.reference:check_two",
)

swiglu_gradient = Op(
    "swiglu_gradient",
    reference=f"{_ROOM}.reference:swiglu_gradient",
    impls=(
        Impl("triton", f"{_ROOM}.triton_impl:swiglu_gradient", device="cuda", needs=("triton",)),
    ),
)
