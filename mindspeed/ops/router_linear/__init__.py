"""The scores of a router: tokens and weights of 16 bits, multiplied and summed in float32."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.router_linear"

router_linear = Op(
    "router_linear",
    reference=f"{_PACKAGE}.reference:router_linear",
    impls=(
        Impl(
            "tensor_cores",
            f"{_PACKAGE}.tensor_cores:router_linear",
            device="cuda",
            needs=("triton",),
        ),
    ),
    check=f"{_PACKAGE}.reference:check",
)
