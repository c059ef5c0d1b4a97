"""Output layer and cross entropy in one, without all logits in memory."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.linear_cross_entropy"

linear_cross_entropy = Op(
    "linear_cross_entropy",
    reference=f"{_PACKAGE}.reference:linear_cross_entropy",
    impls=(
        Impl(
            "triton",
            f"{_PACKAGE}.triton_impl:linear_cross_entropy",
            device="cuda",
            needs=("triton",),
        ),
    ),
    check=f"{_PACKAGE}.reference:check",
)
