"""Copy each token once per expert it goes to, sorted by expert."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.moe_token_permute"

moe_token_permute = Op(
    "moe_token_permute",
    reference=f"{_ROOM}.reference:moe_token_permute",
    impls=(
        # What the reference calls, token_rows, has kernels of its own.
        Impl("triton", f"{_ROOM}.reference:moe_token_permute", device="cuda", needs=("triton",)),
        Impl("npu", f"{_ROOM}.npu_impl:moe_token_permute", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_ROOM}.reference:check",
)
