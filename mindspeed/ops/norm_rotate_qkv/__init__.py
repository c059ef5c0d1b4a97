"""Queries and keys out of a packed qkv tensor, normed by head and rotated, and values, in one."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.norm_rotate_qkv"

norm_rotate_qkv = Op(
    "norm_rotate_qkv",
    reference=f"{_PACKAGE}.reference:norm_rotate_qkv",
    check=f"{_PACKAGE}.reference:check",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:norm_rotate_qkv", device="cuda", needs=("triton",)),
        Impl("npu", f"{_PACKAGE}.npu_impl:norm_rotate_qkv", device="npu", needs=("torch_npu",)),
    ),
)
