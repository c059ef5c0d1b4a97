"""Merge two partial attentions of the same queries by their softmax statistics."""

from mindspeed.ops.dispatch import Impl, Op

ring_attention_update = Op(
    "ring_attention_update",
    reference="mindspeed.ops.ring_attention_update.reference:ring_attention_update",
    check="mindspeed.ops.ring_attention_update.contract:check",
    parameters=(
        *("prev_attn_out", "prev_softmax_max", "prev_softmax_sum"),
        *("cur_attn_out", "cur_softmax_max", "cur_softmax_sum"),
        *("actual_seq_qlen", "layout"),
    ),
    impls=(
        Impl(
            "triton",
            "mindspeed.ops.ring_attention_update.triton_impl:ring_attention_update",
            device="cuda",
            needs=("triton",),
        ),
        Impl(
            "npu",
            "mindspeed.ops.ring_attention_update.npu_impl:ring_attention_update",
            device="npu",
            needs=("torch_npu",),
        ),
    ),
)
