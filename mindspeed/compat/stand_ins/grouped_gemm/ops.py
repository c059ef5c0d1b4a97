"""Grouped GEMM: consecutive groups of rows, each multiplied by a matrix of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from mindspeed.ops.gmm import gmm_v2


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """Multiply the i-th group of rows of `a` by `b[i]`, transposed if asked: (T, K) -> (T, N)."""
    if len(batch_sizes) != len(b) or (
        batch_sizes.device.type == "cpu" and int(batch_sizes.sum()) != len(a)
    ):
        raise ValueError(
            f"gmm was given {len(a)} rows and {len(b)} matrices for groups of "
            f"{batch_sizes.tolist()} rows: one size a matrix, and all rows in a group, are needed"
        )
    return gmm_v2(a, b.transpose(1, 2) if trans_b else b, group_list=batch_sizes)


def wrap_gmm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Accumulate the weight gradient of a parameter that has a main_grad as it is computed."""

    @functools.wraps(original)
    def accumulating_gmm(
        a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False
    ) -> Tensor:
        parameter = b._base
        if trans_b or getattr(parameter, "main_grad", None) is None:
            return original(a, b, batch_sizes, trans_b)
        return gmm_v2(a, b, group_list=batch_sizes, gemm_fusion=True, original_weight=parameter)

    return accumulating_gmm
