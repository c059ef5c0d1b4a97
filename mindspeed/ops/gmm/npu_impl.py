"""Grouped GEMM on Ascend, as torch-npu 2.13.0 declares it:

npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, ...,
Tensor? group_list=None, ..., int? split_item=0, int? group_type=None,
int? group_list_type=0, ...) -> Tensor[]
"""

from __future__ import annotations

import torch_npu
from torch import Tensor

from mindspeed.ops.gmm.reference import Kernels, make_operators

_ONE_OUTPUT = 3  # split_item: x and the output are one tensor each


def rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows (M, K) by its matrix of weight (E, K, N)."""
    return _grouped(x, weight, ends, group_type=0)


def outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows x^T (K, m) by the same rows of y (m, N): (E, K, N)."""
    return _grouped(x.t(), y, ends, group_type=2)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor, group_type: int) -> Tensor:
    return torch_npu.npu_grouped_matmul(
        [x],
        [weight],
        group_list=ends.long(),
        split_item=_ONE_OUTPUT,
        group_type=group_type,
        group_list_type=0,
    )[0]


gmm, gmm_v2 = make_operators(Kernels(rows, outer))
