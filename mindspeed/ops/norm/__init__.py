"""RMSNorm and LayerNorm over the last dimension, alone and after dropout and a residual."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.norm"

rms_norm = Op(
    "rms_norm",
    reference=f"{_PACKAGE}.reference:rms_norm",
    check=f"{_PACKAGE}.reference:check_rms_norm",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:rms_norm", "cuda", ("triton",)),
        Impl("npu", f"{_PACKAGE}.npu_impl:rms_norm", "npu", ("torch_npu",)),
    ),
)
add_rms_norm = Op(
    "add_rms_norm",
    reference=f"{_PACKAGE}.reference:add_rms_norm",
    check=f"{_PACKAGE}.reference:check_add_rms_norm",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:add_rms_norm", "cuda", ("triton",)),
        Impl("npu", f"{_PACKAGE}.npu_impl:add_rms_norm", "npu", ("torch_npu",)),
    ),
)
layer_norm = Op(
    "layer_norm",
    reference=f"{_PACKAGE}.reference:layer_norm",
    check=f"{_PACKAGE}.reference:check_layer_norm",
    impls=(Impl("triton", f"{_PACKAGE}.triton_impl:layer_norm", "cuda", ("triton",)),),
)
dropout_add_layer_norm, dropout_add_rms_norm = (
    Op(
        name,
        reference=f"{_PACKAGE}.reference:{name}",
        check=f"{_PACKAGE}.reference:check_dropout_add_norm",
        parameters=(
            *("x0", "residual", "weight", "bias", "dropout_p", "epsilon"),
            *("rowscale", "layerscale", "prenorm", "residual_in_fp32", "return_dropout_mask"),
        ),
        impls=(Impl("triton", f"{_PACKAGE}.triton_impl:{name}", "cuda", ("triton",)),),
    )
    for name in ("dropout_add_layer_norm", "dropout_add_rms_norm")
)
