"""Tokens to their experts over two process groups, and the experts' first product."""

from mindspeed.ops.dispatch import Op

_ROOM = "mindspeed.ops.all_to_all_all_gather_bmm"

all_to_all_all_gather_bmm = Op(
    "all_to_all_all_gather_bmm",
    reference=f"{_ROOM}.reference:all_to_all_all_gather_bmm",
    check=f"{_ROOM}.reference:check",
)
