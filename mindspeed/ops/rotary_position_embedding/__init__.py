"""Rotary position embedding: by cos and sin tables, by angles, and of a packed qkv tensor."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.rotary_position_embedding"

rotary_position_embedding = Op(
    "rotary_position_embedding",
    reference=f"{_PACKAGE}.reference:rotary_position_embedding",
    check=f"{_PACKAGE}.reference:check_table",
    impls=(
        Impl(
            "triton",
            f"{_PACKAGE}.triton_impl:rotary_position_embedding",
            device="cuda",
            needs=("triton",),
        ),
        Impl(
            "npu",
            f"{_PACKAGE}.npu_impl:rotary_position_embedding",
            device="npu",
            needs=("torch_npu",),
        ),
    ),
)
rotate_qk = Op(
    "rotate_qk",
    reference=f"{_PACKAGE}.reference:rotate_qk",
    check=f"{_PACKAGE}.reference:check_angles",
    impls=(
        Impl(
            "triton",
            f"{_PACKAGE}.triton_impl:rotate_qk",
            device="cuda",
            needs=("triton",),
        ),
    ),
)
rotate_qkv = Op(
    "rotate_qkv",
    reference=f"{_PACKAGE}.reference:rotate_qkv",
    check=f"{_PACKAGE}.reference:check_packed",
    impls=(
        Impl(
            "triton",
            f"{_PACKAGE}.triton_impl:rotate_qkv",
            device="cuda",
            needs=("triton",),
        ),
    ),
)
