"""Attention with the layouts, masks and position biases of npu_fusion_attention."""

from mindspeed.ops.dispatch import Impl, Op

fusion_attention = Op(
    "fusion_attention",
    reference="mindspeed.ops.fusion_attention.reference:fusion_attention",
    check="mindspeed.ops.fusion_attention.reference:check",
    impls=(
        Impl("sdpa", "mindspeed.ops.fusion_attention.cuda_impl:fusion_attention", device="cuda"),
        Impl(
            "npu",
            "mindspeed.ops.fusion_attention.npu_impl:fusion_attention",
            device="npu",
            needs=("torch_npu",),
        ),
    ),
)
