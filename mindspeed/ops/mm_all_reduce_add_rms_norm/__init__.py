"""Row-parallel GEMM, all-reduce, residual and RMSNorm in one call, also in place."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.mm_all_reduce_add_rms_norm"

mm_all_reduce_add_rms_norm, mm_all_reduce_add_rms_norm_ = (
    Op(
        name,
        reference=f"{_PACKAGE}.reference:{name}",
        impls=(Impl("npu", f"{_PACKAGE}.npu_impl:{name}", device="npu", needs=("torch_npu",)),),
        check=f"{_PACKAGE}.reference:check",
        parameters=(
            *("x1", "x2", "residual", "gamma", "hcom", "reduce_op", "epsilon", "bias"),
            *("antiquant_scale", "antiquant_offset", "dequant_scale", "antiquant_group_size"),
            "comm_turn",
        ),
    )
    for name in ("mm_all_reduce_add_rms_norm", "mm_all_reduce_add_rms_norm_")
)
