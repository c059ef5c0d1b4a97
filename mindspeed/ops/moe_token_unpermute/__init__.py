"""Add the rows of each token up, each times its routing weight."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.moe_token_unpermute"

moe_token_unpermute = Op(
    "moe_token_unpermute",
    reference=f"{_ROOM}.reference:moe_token_unpermute",  # moves by the kernels of token_rows
    impls=(
        Impl("npu", f"{_ROOM}.npu_impl:moe_token_unpermute", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_ROOM}.reference:check",
)
