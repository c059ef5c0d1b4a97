"""Products of consecutive groups of rows, each with a matrix of its own."""

from __future__ import annotations

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
