"""Experts of equal load whose GEMMs are one operator with the collectives around them.

With drop-and-pad every expert gets `capacity` rows from every rank, so that dispatch and the first
GEMM are `all_to_all_all_gather_bmm`, the second GEMM and combine `bmm_reduce_scatter_all_to_all`.
The dispatcher moves the routing weights only, in the layout of the operators' rows.
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

from mindspeed.distributed.collectives import all_gather
from mindspeed.moe.alltoall_dispatcher import AllToAllDispatcher
from mindspeed.moe.interface import CombinedByExperts
from mindspeed.ops.all_to_all_all_gather_bmm import all_to_all_all_gather_bmm
from mindspeed.ops.all_to_all_all_gather_bmm.reference import to_experts
from mindspeed.ops.bmm_reduce_scatter_all_to_all import bmm_reduce_scatter_all_to_all

_SPLIT_CAPACITY = 1
"""How the TP group splits the operators' rows: each rank has its own tokens, as whole rows."""


class BmmDispatcher(CombinedByExperts, AllToAllDispatcher):
    """The local half of a dispatcher; the experts' GEMMs do the rest."""

    def token_dispatch(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Send the weights to the experts: (E * C,) -> (E / EP, EP, TP * C)."""
        by_expert = weights.view(self.num_experts, self.capacity)
        received = to_experts(by_expert, self.ep_group, self.ep_size)
        return rows, all_gather(received, self.tp_group, 2)

    def dispatch_postprocess(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Leave the rows to the first GEMM."""
        return rows, self.tokens_per_expert, weights.flatten()

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Add up the outputs of each token."""
        return self._add_up(hidden_states)


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
