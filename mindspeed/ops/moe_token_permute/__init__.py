"""Copy each token once per expert it goes to, sorted by expert."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.moe_token_permute"

moe_token_permute = Op(
    "moe_token_permute",
    reference=f"{_ROOM}.reference:moe_token_permute",  # moves by the kernels of token_rows
    impls=(Impl("npu", f"{_ROOM}.npu_impl:moe_token_permute", device="npu", needs=("torch_npu",)),),
    check=f"{_ROOM}.reference:check",
)
