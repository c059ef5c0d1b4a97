"""Rotary position embedding: by tables of cosines and sines, by angles, and out of a packed qkv."""

from mindspeed.ops.dispatch import Impl, Op

rotary_position_embedding = Op(
    "rotary_position_embedding",
    reference="mindspeed.ops.rotary_position_embedding.reference:rotary_position_embedding",
    check="mindspeed.ops.rotary_position_embedding.contract:check_table",
    impls=(
        Impl(
            "triton",
            "mindspeed.ops.rotary_position_embedding.triton_impl:rotary_position_embedding",
            device="cuda",
            needs=("triton",),
        ),
        Impl(
            "npu",
            "mindspeed.ops.rotary_position_embedding.npu_impl:rotary_position_embedding",
            device="npu",
            needs=("torch_npu",),
        ),
    ),
)
rotate_qk = Op(
    "rotate_qk",
    reference="mindspeed.ops.rotary_position_embedding.reference:rotate_qk",
    check="mindspeed.ops.rotary_position_embedding.contract:check_angles",
    impls=(
        Impl(
            "triton",
            "mindspeed.ops.rotary_position_embedding.triton_impl:rotate_qk",
            device="cuda",
            needs=("triton",),
        ),
    ),
)
rotate_qkv = Op(
    "rotate_qkv",
    reference="mindspeed.ops.rotary_position_embedding.reference:rotate_qkv",
    check="mindspeed.ops.rotary_position_embedding.contract:check_packed",
    impls=(
        Impl(
            "triton",
            "mindspeed.ops.rotary_position_embedding.triton_impl:rotate_qkv",
            device="cuda",
            needs=("triton",),
        ),
    ),
)
