"""Two GEMMs with an activation between them, for a dense layer or for experts."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.ffn"

ffn = Op(
    "ffn",
    reference=f"{_PACKAGE}.reference:ffn",
    impls=(
        # The reference calls gmm, which runs torch's grouped GEMM there.
        Impl("grouped_mm", f"{_PACKAGE}.reference:ffn", device="cuda"),
        Impl("npu", f"{_PACKAGE}.npu_impl:ffn", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_PACKAGE}.reference:check",
)
