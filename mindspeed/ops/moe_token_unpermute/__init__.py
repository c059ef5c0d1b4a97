"""Add the rows of each token up, each times its routing weight."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.moe_token_unpermute"

moe_token_unpermute = Op(
    "moe_token_unpermute",
    reference=f"{_ROOM}.reference:moe_token_unpermute",
    impls=(
        # What the reference calls, token_rows, has kernels of its own.
        Impl("triton", f"{_ROOM}.reference:moe_token_unpermute", device="cuda", needs=("triton",)),
        Impl("npu", f"{_ROOM}.npu_impl:moe_token_unpermute", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_ROOM}.reference:check",
)
