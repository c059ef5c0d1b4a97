"""One step of Adam or AdamW on lists of tensors, with an average of the weights and a copy."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.adamw"

adamw = Op(
    "adamw",
    reference=f"{_ROOM}.reference:adamw",
    impls=(Impl("triton", f"{_ROOM}.triton_impl:adamw", device="cuda", needs=("triton",)),),
    check=f"{_ROOM}.reference:check",
)
