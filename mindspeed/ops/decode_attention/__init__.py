"""Attention of one new token a row to a KV cache, with its rotary embedding and cache update."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.decode_attention"

decode_attention = Op(
    "decode_attention",
    reference=f"{_PACKAGE}.reference:decode_attention",
    check=f"{_PACKAGE}.reference:check",
    impls=(
        Impl(
            "triton", f"{_PACKAGE}.triton_impl:decode_attention", device="cuda", needs=("triton",)
        ),
    ),
)
