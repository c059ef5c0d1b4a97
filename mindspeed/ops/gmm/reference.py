"""Grouped matrix products in plain torch: one product a group."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from mindspeed.ops.gmm.contract import Products, operators


# The loops need the sizes of the groups as numbers, which a compiler does not have: to it, each
# is one operator.
@torch.library.custom_op("mindspeed::grouped_rows", mutates_args=())
def rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows (M, K) by its matrix of weight (E, K, N)."""
    bounds = [0, *ends.tolist()]
    if bounds != sorted(bounds) or bounds[-1] != len(x):
        raise ValueError(
            f"gmm was given groups that end at {bounds[1:]} for {len(x)} rows: the ends must not "
            "fall and the last must be the number of rows"
        )
    out = x.new_empty(len(x), weight.shape[2])
    for (start, end), matrix in zip(pairwise(bounds), weight, strict=True):
        torch.mm(x[start:end], matrix, out=out[start:end])
    return out


@rows.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("mindspeed::grouped_outer", mutates_args=())
def outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows x^T (K, m) by the same rows of y (m, N): (E, K, N)."""
    bounds = [0, *ends.tolist()]
    out = x.new_empty(len(ends), x.shape[1], y.shape[1])
    for (start, end), product in zip(pairwise(bounds), out, strict=True):
        torch.mm(x[start:end].t(), y[start:end], out=product)
    return out


@outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


LOOP = Products(rows, outer)
gmm, gmm_v2 = operators(LOOP)
