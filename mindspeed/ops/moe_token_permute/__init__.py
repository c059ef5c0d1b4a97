"""Copy each token once per expert it goes to, sorted by expert, and sum the copies again."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.moe_token_permute"

moe_token_permute, moe_token_unpermute = (
    Op(
        name,
        reference=f"{_PACKAGE}.reference:{name}",
        impls=(
            # The reference calls token_rows, which has kernels of its own.
            Impl("triton", f"{_PACKAGE}.reference:{name}", device="cuda", needs=("triton",)),
            Impl("npu", f"{_PACKAGE}.npu_impl:{name}", device="npu", needs=("torch_npu",)),
        ),
        check=f"{_PACKAGE}.reference:{check}",
    )
    for name, check in (
        ("moe_token_permute", "check_permute"),
        ("moe_token_unpermute", "check_unpermute"),
    )
)
