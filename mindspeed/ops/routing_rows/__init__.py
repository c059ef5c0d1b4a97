"""Number the rows that a routing mask makes: by expert, and by token."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.routing_rows"

routing_rows = Op(
    "routing_rows",
    reference=f"{_ROOM}.reference:routing_rows",
    impls=(Impl("triton", f"{_ROOM}.triton_impl:routing_rows", device="cuda", needs=("triton",)),),
    check=f"{_ROOM}.reference:check",
)
