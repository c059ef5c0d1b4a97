"""Row-parallel GEMM with residual and norm on Ascend, as torch-npu 2.13.0 declares the GEMM:

npu_mm_all_reduce_base(Tensor x1, Tensor x2, str hcom, *, str reduce_op='sum', Tensor? bias=None,
Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? x3=None,
Tensor? dequant_scale=None, ..., int antiquant_group_size=0, int comm_turn=0, ...) -> Tensor
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from torch import Tensor

from mindspeed.distributed.collectives import Group, resolve_group
from mindspeed.ops.norm import rms_norm


def mm_all_reduce_add_rms_norm(
    x1: Tensor,
    x2: Tensor,
    residual: Tensor,
    gamma: Tensor,
    hcom: Group,
    reduce_op: str = "sum",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the sum and its norm."""
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
    """Add to residual in place, and return it and its norm."""
    result = torch_npu.npu_mm_all_reduce_base(
        x1,
        x2,
        _comm_name(hcom),
        reduce_op=reduce_op,
        bias=bias,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        dequant_scale=dequant_scale,
        antiquant_group_size=antiquant_group_size,
        comm_turn=comm_turn,
    )
    residual += result.view(residual.shape)
    return residual, rms_norm(residual, gamma, epsilon)


def _comm_name(hcom: Group) -> str:
    """Return the name of the HCCL communicator; a string is one already."""
    if isinstance(hcom, str):
        return hcom
    backend: Any = resolve_group(hcom)._get_backend(torch.device("npu"))
    return str(backend.get_hccl_comm_name(dist.get_rank()))
