"""Two products with an activation between them, for one layer or for the experts of a mixture."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.ffn"

ffn = Op(
    "ffn",
    reference=f"{_ROOM}.reference:ffn",
    impls=(
        # What the reference calls, gmm, is grouped there.
        Impl("grouped_mm", f"{_ROOM}.reference:ffn", device="cuda"),
        Impl("npu", f"{_ROOM}.npu_impl:ffn", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_ROOM}.reference:check",
)
