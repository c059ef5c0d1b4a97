"""Weight gradients of grouped GEMMs, in plain torch.

out[g] (K, N) += x_g^T @ dy_g for the rows g of each group, in place and in float32 (float64 for a
float64 out). Empty groups change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def groupmatmul_add_fp32(
    x: Tensor, dy: Tensor, group_list: Tensor | Sequence[int], out: Tensor | Sequence[Tensor]
) -> None:
    """Add x_g^T @ dy_g to out for each group of rows.

    Args:
        x: (M, K)
        dy: (M, N)
        group_list: the end of each of E groups of rows.
        out: float32, E * K * N numbers in one tensor, or E tensors of (K, N).
    """
    ends = group_list.tolist() if isinstance(group_list, Tensor) else group_list
    with torch.no_grad():
        for (start, end), total in zip(
            pairwise([0, *ends]), group_outputs(x, dy, out), strict=True
        ):
            rows, columns = x[start:end].t(), dy[start:end]
            total.addmm_(rows.to(total.dtype), columns.to(total.dtype))


def group_outputs(x: Tensor, dy: Tensor, out: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the (K, N) matrix of each group."""
    return out.view(-1, x.shape[1], dy.shape[1]).unbind() if isinstance(out, Tensor) else out


def check(
    x: Tensor, dy: Tensor, group_list: Tensor | Sequence[int], out: Tensor | Sequence[Tensor]
) -> None:
    """Raise ValueError for mismatched shapes and for an out that would round."""
    shape = (x.shape[-1], dy.shape[-1])
    acc_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.ndim != 2 or dy.ndim != 2 or len(x) != len(dy) or x.dtype != dy.dtype:
        raise ValueError(
            "groupmatmul_add_fp32 multiplies (M, K) by (M, N) of one dtype, got "
            f"{tuple(x.shape)} of {x.dtype} and {tuple(dy.shape)} of {dy.dtype}"
        )
    if isinstance(out, Tensor):
        is_match = out.numel() == len(group_list) * math.prod(shape)
    else:
        is_match = len(out) == len(group_list) and all(total.shape == shape for total in out)
    dtypes = {out.dtype} if isinstance(out, Tensor) else {total.dtype for total in out}
    if not is_match or dtypes != {acc_dtype}:
        shapes = tuple(out.shape) if isinstance(out, Tensor) else [tuple(t.shape) for t in out]
        raise ValueError(
            f"groupmatmul_add_fp32 adds to {len(group_list)} x {shape} numbers of {acc_dtype}, got "
            f"out of {shapes} and {', '.join(map(str, dtypes))}"
        )
