"""Choose the experts of each token, their weights, and the scores of a load-balancing loss."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.router_topk"

router_topk = Op(
    "router_topk",
    reference=f"{_PACKAGE}.reference:router_topk",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:router_topk", device="cuda", needs=("triton",)),
    ),
    check=f"{_PACKAGE}.reference:check",
)
