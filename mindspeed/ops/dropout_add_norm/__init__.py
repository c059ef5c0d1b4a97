"""Dropout, residual and norm in one operator, with LayerNorm or RMSNorm."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.dropout_add_norm"

dropout_add_layer_norm, dropout_add_rms_norm = (
    Op(
        name,
        reference=f"{_ROOM}.reference:{name}",
        check=f"{_ROOM}.contract:check",
        parameters=(
            *("x0", "residual", "weight", "bias", "dropout_p", "epsilon"),
            *("rowscale", "layerscale", "prenorm", "residual_in_fp32", "return_dropout_mask"),
        ),
        impls=(Impl("triton", f"{_ROOM}.triton_impl:{name}", device="cuda", needs=("triton",)),),
    )
    for name in ("dropout_add_layer_norm", "dropout_add_rms_norm")
)
