"""Copy each token into several rows, and add the rows of each token up: each other's transpose."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.token_rows"

spread_rows = Op(
    "token_rows",
    reference=f"{_ROOM}.reference:spread_rows",
    impls=(Impl("triton", f"{_ROOM}.triton_impl:spread_rows", device="cuda", needs=("triton",)),),
    check=f"{_ROOM}.contract:check_spread",
)

gather_rows = Op(
    "token_rows",
    reference=f"{_ROOM}.reference:gather_rows",
    impls=(Impl("triton", f"{_ROOM}.triton_impl:gather_rows", device="cuda", needs=("triton",)),),
    check=f"{_ROOM}.contract:check_gather",
)
