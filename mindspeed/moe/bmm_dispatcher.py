"""The dispatcher of experts of equal load whose GEMMs are one operator with their collectives.

With drop-and-pad every expert gets `capacity` rows from every rank, so that dispatch and the first
GEMM are `all_to_all_all_gather_bmm`, the second GEMM and combine `bmm_reduce_scatter_all_to_all`
(bmm_linears.py). The dispatcher moves the routing weights only, in the layout of their rows.
"""

from __future__ import annotations

from torch import Tensor

from mindspeed.distributed.collectives import all_gather
from mindspeed.moe.alltoall_dispatcher import AllToAllDispatcher
from mindspeed.moe.interface import CombinedByExperts
from mindspeed.ops.all_to_all_all_gather_bmm.reference import to_experts


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
