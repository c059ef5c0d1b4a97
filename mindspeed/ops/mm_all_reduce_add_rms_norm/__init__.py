"""Row-parallel product, all-reduce, residual and RMSNorm in one call, and over the residual."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.mm_all_reduce_add_rms_norm"

mm_all_reduce_add_rms_norm, mm_all_reduce_add_rms_norm_ = (
    Op(
        name,
        reference=f"{_ROOM}.reference:{name}",
        impls=(Impl("npu", f"{_ROOM}.npu_impl:{name}", device="npu", needs=("torch_npu",)),),
        check=f"{_ROOM}.reference:check",
        parameters=(
            *("x1", "x2", "residual", "gamma", "hcom", "reduce_op", "epsilon", "bias"),
            *("antiquant_scale", "antiquant_offset", "dequant_scale", "antiquant_group_size"),
            "comm_turn",
        ),
    )
    for name in ("mm_all_reduce_add_rms_norm", "mm_all_reduce_add_rms_norm_")
)
