"""The grouped linears of experts of equal load, with their collectives as one operator each.

Apart from the dispatcher: Megatron imports the classes that these replace before its dispatchers
can be imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TERowParallelGroupedLinear,
)
from torch import Tensor

from mindspeed.ops.all_to_all_all_gather_bmm import all_to_all_all_gather_bmm
from mindspeed.ops.bmm_reduce_scatter_all_to_all import bmm_reduce_scatter_all_to_all

_SPLIT_CAPACITY = 1
"""How the TP group splits the operators' rows: each rank has its own tokens, as whole rows."""


class ColumnBmm(TEColumnParallelGroupedLinear):
    """The first GEMM, on the rows of this rank for all experts."""

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, None]:
        """Return (E / EP * EP * TP * C, M / TP) for x (E * C, H)."""
        weight, groups = _stacked(self), _groups()
        rows = x.unflatten(0, (groups[1] * len(weight), -1))
        out, _, _ = all_to_all_all_gather_bmm(rows, weight, *groups, shard_type=_SPLIT_CAPACITY)
        return out.flatten(0, 1), None


class RowBmm(TERowParallelGroupedLinear):
    """The second GEMM, which returns the rows of this rank."""

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, None]:
        """Return (E * C, H) for x (E / EP * EP * TP * C, M / TP)."""
        weight = _stacked(self)
        rows = x.unflatten(0, (len(weight), -1))
        out = bmm_reduce_scatter_all_to_all(rows, weight, *_groups(), shard_type=_SPLIT_CAPACITY)
        return out.flatten(0, 1), None


def _stacked(linear: Any) -> Tensor:
    """Return the weights of the local experts as one tensor (E / EP, in, out)."""
    weights = [getattr(linear, f"weight{index}") for index in range(linear.num_gemms)]
    return torch.stack(weights).transpose(1, 2)


def _groups() -> tuple[Any, int, Any, int]:
    ep = parallel_state.get_expert_model_parallel_group()
    tp = parallel_state.get_expert_tensor_parallel_group()
    return ep, ep.size(), tp, tp.size()
