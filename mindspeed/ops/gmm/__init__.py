"""Grouped matrix products: each group of rows of x times a matrix of its own."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.gmm"

gmm = Op(
    "gmm",
    reference=f"{_ROOM}.reference:gmm",
    impls=(
        Impl("grouped_mm", f"{_ROOM}.cuda_impl:gmm", device="cuda", needs=("triton",)),
        Impl("npu", f"{_ROOM}.npu_impl:gmm", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_ROOM}.contract:check",
)

gmm_v2 = Op(
    "gmm",
    reference=f"{_ROOM}.reference:gmm_v2",
    impls=(
        Impl("grouped_mm", f"{_ROOM}.cuda_impl:gmm_v2", device="cuda", needs=("triton",)),
        Impl("npu", f"{_ROOM}.npu_impl:gmm_v2", device="npu", needs=("torch_npu",)),
    ),
    check=f"{_ROOM}.contract:check",
)
