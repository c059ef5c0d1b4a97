"""Attention in every layout, mask and position bias that the documents name."""

from mindspeed.ops.dispatch import Impl, Op

fusion_attention = Op(
    "fusion_attention",
    reference="mindspeed.ops.fusion_attention.reference:fusion_attention",
    check="mindspeed.ops.fusion_attention.contract:check",
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
