"""Grouped products whose weight gradients go to float32 main_grad as they are multiplied."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from mindspeed.ops.gmm import gmm_v2


def wrap_gmm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Accumulate for a view of a parameter that has a main_grad; others go to the original."""

    @functools.wraps(original)
    def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
        parameter = b._base
        if trans_b or getattr(parameter, "main_grad", None) is None:
            return original(a, b, batch_sizes, trans_b)
        return gmm_v2(a, b, group_list=batch_sizes, gemm_fusion=True, original_weight=parameter)

    return gmm
