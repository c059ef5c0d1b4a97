"""Output layer and cross entropy in one, without the logits of the whole vocabulary in memory."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.linear_cross_entropy"

linear_cross_entropy = Op(
    "linear_cross_entropy",
    reference=f"{_ROOM}.reference:linear_cross_entropy",
    impls=(
        Impl(
            "triton", f"{_ROOM}.triton_impl:linear_cross_entropy", device="cuda", needs=("triton",)
        ),
    ),
    check=f"{_ROOM}.reference:check",
)
