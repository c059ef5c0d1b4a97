"""Number the permuted rows of a routing mask: by expert, and by token."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.routing_rows"

routing_rows = Op(
    "routing_rows",
    reference=f"{_PACKAGE}.reference:routing_rows",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:routing_rows", device="cuda", needs=("triton",)),
    ),
    check=f"{_PACKAGE}.reference:check",
)
