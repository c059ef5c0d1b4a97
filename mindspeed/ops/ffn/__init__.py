"""Two products with an activation between them, for one layer or for the experts of a mixture."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.ffn"

ffn = Op(
    "ffn",
    reference=f"{_ROOM}.reference:ffn",  # multiplies by the gmm of the device
    impls=(Impl("npu", f"{_ROOM}.npu_impl:ffn", device="npu", needs=("torch_npu",)),),
    check=f"{_ROOM}.reference:check",
)
