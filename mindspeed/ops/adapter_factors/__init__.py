"""The factors of a layer's adapters as two matrices, and the gradients of these back to them."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.adapter_factors"

join_factors = Op(
    "join_factors",
    reference=f"{_PACKAGE}.reference:join_factors",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:join_factors", device="cuda", needs=("triton",)),
    ),
    check=f"{_PACKAGE}.reference:check_join_factors",
)

add_factor_gradients = Op(
    "add_factor_gradients",
    reference=f"{_PACKAGE}.reference:add_factor_gradients",
    impls=(
        Impl(
            "triton",
            f"{_PACKAGE}.triton_impl:add_factor_gradients",
            device="cuda",
            needs=("triton",),
        ),
    ),
    check=f"{_PACKAGE}.reference:check_add_factor_gradients",
)
