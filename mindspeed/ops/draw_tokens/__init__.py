"""Draw a token a row from the softmax of logits, by numbers that are given."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.draw_tokens"

draw_tokens = Op(
    "draw_tokens",
    reference=f"{_PACKAGE}.reference:draw_tokens",
    check=f"{_PACKAGE}.reference:check",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:draw_tokens", device="cuda", needs=("triton",)),
    ),
)
