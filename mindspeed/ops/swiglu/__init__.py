"""SwiGLU: silu(gate) * up, with gate and up as the two halves of one tensor, or as two."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.swiglu"

swiglu = Op(
    "swiglu",
    reference=f"{_PACKAGE}.reference:swiglu",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:swiglu", device="cuda", needs=("triton",)),
        Impl("npu", f"{_PACKAGE}.npu_impl:swiglu", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_PACKAGE}.reference:check",
)

silu_mul = Op(
    "silu_mul",
    reference=f"{_PACKAGE}.reference:silu_mul",
    impls=(Impl("triton", f"{_PACKAGE}.triton_impl:silu_mul", device="cuda", needs=("triton",)),),
    check=f"{_PACKAGE}.reference:check_two",
)

swiglu_gradient = Op(
    "swiglu_gradient",
    reference=f"{_PACKAGE}.reference:swiglu_gradient",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:swiglu_gradient", device="cuda", needs=("triton",)),
    ),
)

weighted_swiglu_gradient = Op(
    "weighted_swiglu_gradient",
    reference=f"{_PACKAGE}.reference:weighted_swiglu_gradient",
    impls=(
        Impl(
            "triton",
            f"{_PACKAGE}.triton_impl:weighted_swiglu_gradient",
            device="cuda",
            needs=("triton",),
        ),
    ),
)
