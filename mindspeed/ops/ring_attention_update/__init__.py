"""Merge two partial attentions of the same queries by their softmax statistics."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.ring_attention_update"

ring_attention_update = Op(
    "ring_attention_update",
    reference=f"{_PACKAGE}.reference:ring_attention_update",
    check=f"{_PACKAGE}.reference:check",
    parameters=(
        *("prev_attn_out", "prev_softmax_max", "prev_softmax_sum"),
        *("cur_attn_out", "cur_softmax_max", "cur_softmax_sum"),
        *("actual_seq_qlen", "layout"),
    ),
    impls=(
        Impl(
            "triton",
            f"{_PACKAGE}.triton_impl:ring_attention_update",
            device="cuda",
            needs=("triton",),
        ),
        Impl(
            "npu",
            f"{_PACKAGE}.npu_impl:ring_attention_update",
            device="npu",
            needs=("torch_npu",),
        ),
    ),
)
