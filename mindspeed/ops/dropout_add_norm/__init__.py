"""Dropout, residual and norm in one operator, with LayerNorm or RMSNorm."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.dropout_add_norm"

dropout_add_layer_norm, dropout_add_rms_norm = (
    Op(
        name,
        reference=f"{_ROOM}.reference:{name}",
        check=f"{_ROOM}.contract:check",
        impls=(Impl("triton", f"{_ROOM}.triton_impl:{name}", device="cuda", needs=("triton",)),),
    )
    for name in ("dropout_add_layer_norm", "dropout_add_rms_norm")
)
