"""LayerNorm: (x - mean) / std * weight + bias over the last dimension."""

from mindspeed.ops.dispatch import Impl, Op

layer_norm = Op(
    "layer_norm",
    reference="mindspeed.ops.layer_norm.reference:layer_norm",
    check="mindspeed.ops.layer_norm.contract:check",
    impls=(Impl("triton", "mindspeed.ops.layer_norm.triton_impl:layer_norm", "cuda", ("triton",)),),
)
