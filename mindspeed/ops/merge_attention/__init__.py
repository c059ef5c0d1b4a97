"""Merge attention over more keys into an output, and sum gradients of rows: both in place."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.merge_attention"
_TRITON = f"{_PACKAGE}.triton_impl"

merge_attention = Op(
    "merge_attention",
    reference=f"{_PACKAGE}.reference:merge_attention",
    check=f"{_PACKAGE}.reference:check",
    impls=(Impl("triton", f"{_TRITON}:merge_attention", device="cuda", needs=("triton",)),),
)
add_rows = Op(
    "add_rows",
    reference=f"{_PACKAGE}.reference:add_rows",
    check=f"{_PACKAGE}.reference:check_rows",
    impls=(Impl("triton", f"{_TRITON}:add_rows", device="cuda", needs=("triton",)),),
)
