"""Cross entropy of logits whose vocabulary may be split over a process group."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.cross_entropy"

cross_entropy = Op(
    "cross_entropy",
    reference=f"{_PACKAGE}.reference:cross_entropy",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:cross_entropy", device="cuda", needs=("triton",)),
    ),
    check=f"{_PACKAGE}.reference:check",
)
