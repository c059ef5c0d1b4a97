"""Copy each token into several rows, and sum the rows of each token (the transpose)."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.token_rows"

spread_rows = Op(
    "token_rows",
    reference=f"{_PACKAGE}.reference:spread_rows",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:spread_rows", device="cuda", needs=("triton",)),
    ),
    check=f"{_PACKAGE}.reference:check_spread",
)

gather_rows = Op(
    "token_rows",
    reference=f"{_PACKAGE}.reference:gather_rows",
    impls=(
        Impl("triton", f"{_PACKAGE}.triton_impl:gather_rows", device="cuda", needs=("triton",)),
    ),
    check=f"{_PACKAGE}.reference:check_gather",
)
