"""y = all_reduce(x1 @ x2 + bias) + residual and RMSNorm(y) * gamma, forward only.

The rows are cut in slices: the all-reduce of a slice overlaps with the GEMM of the next. x2
may be int8 (x2 is then (x2 + antiquant_offset) * antiquant_scale), or x1 and x2 both (the GEMM and
the int32 bias are then exact, times dequant_scale).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mindspeed.distributed.collectives import Group, all_reduce_each
from mindspeed.ops.dispatch import refuse_gradient
from mindspeed.ops.norm import rms_norm
from mindspeed.ops.quant_gmm.reference import exact_matmul

_OP = "mm_all_reduce_add_rms_norm"
_SLICES = 4
_GROUP_MULTIPLE = 32


def mm_all_reduce_add_rms_norm(
    x1: Tensor,
    x2: Tensor,
    residual: Tensor,
    gamma: Tensor,
    hcom: Group,
    reduce_op: str = "sum",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the sum and its norm; the options are those of the operator in place."""
    return mm_all_reduce_add_rms_norm_(x1, x2, residual.clone(), gamma, hcom, reduce_op, **options)


def mm_all_reduce_add_rms_norm_(
    x1: Tensor,
    x2: Tensor,
    residual: Tensor,
    gamma: Tensor,
    hcom: Group,
    reduce_op: str = "sum",
    *,
    epsilon: float = 1e-6,
    bias: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    dequant_scale: Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
) -> tuple[Tensor, Tensor]:
    """Add to residual in place, and return it and its norm.

    Args:
        x1: (s, k) or (b, s, k), this rank's columns.
        x2: (k, n), this rank's rows.
        residual: (b, s, n)
        gamma: (n,)
        hcom: the ranks to sum over: a process group, or its name.
        bias: (n,), added on every rank before the sum.
        antiquant_scale: of an int8 x2: one number, (n,), or (k / antiquant_group_size, n).
        antiquant_offset: added to an int8 x2 before the scale.
        dequant_scale: of the GEMM of int8 x1 and x2: one number or (n,).
        antiquant_group_size: how many rows of x2 share a scale; 0 for all.
        comm_turn: accepted for compatibility; the number of slices is fixed.
    """
    if antiquant_scale is not None and x2.dtype == torch.int8 and x1.dtype != torch.int8:
        scale, offset = antiquant_scale, antiquant_offset
        x2 = _dequantise(x2, scale, offset, antiquant_group_size).to(x1.dtype)
    matmul = functools.partial(
        _matmul, x2=x2, bias=bias, dequant_scale=dequant_scale, dtype=residual.dtype
    )
    rows = x1.reshape(-1, x1.shape[-1])
    makers = [functools.partial(matmul, part) for part in rows.chunk(_SLICES)]
    result = torch.cat(all_reduce_each(makers, hcom, reduce_op))
    residual += result.view(residual.shape)
    return residual, rms_norm(residual, gamma, epsilon)


def _matmul(
    x1: Tensor,
    *,
    x2: Tensor,
    bias: Tensor | None,
    dequant_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if dequant_scale is None or x1.dtype != torch.int8:
        result = x1 @ x2
        return result if bias is None else result + bias
    result = exact_matmul(x1, x2)
    result = result if bias is None else result + bias
    return (result * dequant_scale).to(dtype)


def _dequantise(x: Tensor, scale: Tensor, offset: Tensor | None, group_size: int) -> Tensor:
    if group_size:
        scale = scale.repeat_interleave(group_size, 0)
        offset = None if offset is None else offset.repeat_interleave(group_size, 0)
    values = x.to(scale.dtype)
    return (values if offset is None else values + offset) * scale


def check(
    x1: Tensor,
    x2: Tensor,
    residual: Tensor,
    gamma: Tensor,
    hcom: Group,
    reduce_op: str = "sum",
    **options: Any,
) -> None:
    """Raise for arguments that do not match, and for inputs that require a gradient."""
    refuse_gradient(_OP, [x1, x2, residual, gamma, options.get("bias")])
    size = options.get("antiquant_group_size", 0)
    if x1.shape[-1] != x2.shape[0] or residual.shape[-1] != x2.shape[1]:
        raise ValueError(
            f"{_OP} multiplies (.., k) by (k, n) and adds (.., n), got {tuple(x1.shape)}, "
            f"{tuple(x2.shape)} and {tuple(residual.shape)}"
        )
    if x1.dtype == torch.int8 and options.get("dequant_scale") is None:
        raise ValueError(f"{_OP} of int8 tensors needs a dequant_scale")
    if x2.dtype == torch.int8 != x1.dtype and options.get("antiquant_scale") is None:
        raise ValueError(f"{_OP} with an int8 x2 needs an antiquant_scale")
    if size and (size % _GROUP_MULTIPLE or not _GROUP_MULTIPLE <= size < x2.shape[0]):
        raise ValueError(
            f"antiquant_group_size={size}: use a multiple of {_GROUP_MULTIPLE} below {x2.shape[0]}"
        )
