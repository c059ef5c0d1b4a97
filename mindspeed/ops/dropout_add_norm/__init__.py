"""Dropout, residual and norm in one operator, with LayerNorm or RMSNorm."""

from mindspeed.ops.dispatch import Impl, Op

dropout_add_layer_norm = Op(
    "dropout_add_layer_norm",
    reference="mindspeed.ops.dropout_add_norm.reference:dropout_add_layer_norm",
    check="mindspeed.ops.dropout_add_norm.contract:check",
    impls=(
        Impl(
            "triton",
            "mindspeed.ops.dropout_add_norm.triton_impl:dropout_add_layer_norm",
            device="cuda",
            needs=("triton",),
        ),
    ),
)
dropout_add_rms_norm = Op(
    "dropout_add_rms_norm",
    reference="mindspeed.ops.dropout_add_norm.reference:dropout_add_rms_norm",
    check="mindspeed.ops.dropout_add_norm.contract:check",
    impls=(
        Impl(
            "triton",
            "mindspeed.ops.dropout_add_norm.triton_impl:dropout_add_rms_norm",
            device="cuda",
            needs=("triton",),
        ),
    ),
)
