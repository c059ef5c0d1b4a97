"""Attention to a part of the keys, with the log-sum-exp by which parts are merged."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.partial_attention"

partial_attention = Op(
    "partial_attention",
    reference=f"{_PACKAGE}.reference:partial_attention",
    check=f"{_PACKAGE}.reference:check",
    impls=(Impl("flash", f"{_PACKAGE}.cuda_impl:partial_attention", device="cuda"),),
)
partial_attention_backward = Op(
    "partial_attention_backward",
    reference=f"{_PACKAGE}.reference:partial_attention_backward",
    impls=(Impl("flash", f"{_PACKAGE}.cuda_impl:partial_attention_backward", device="cuda"),),
)
