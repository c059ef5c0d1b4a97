"""Every rank gathers the tokens of all, and picks those of its experts.

The all-gathers of the routing map, the weights and the tokens start together; the rows of the
local experts are numbered while weights and tokens travel. Rows are copied and added up as rows.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor

from mindspeed.distributed.async_collectives import Started, start_all_gather
from mindspeed.distributed.collectives import reduce_scatter
from mindspeed.moe.interface import TwoMethods
from mindspeed.ops.routing_rows import routing_rows
from mindspeed.ops.routing_rows.reference import RoutingRows
from mindspeed.ops.token_rows import gather_rows, spread_rows


class AllGatherDispatcher(TwoMethods, MoEAllGatherTokenDispatcher):
    """Megatron's dispatcher with asynchronous collectives; the group spans TP and EP."""

    _started: tuple[Started, Started, Started]
    _rows: RoutingRows

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Flatten the tokens (S / TP, B, H) -> (T, H)."""
        self.hidden_shape = hidden_states.shape
        self.routing_map = routing_map
        return hidden_states.view(-1, self.hidden_shape[-1]), probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Start all collectives, the one that is needed first first."""
        group = self.tp_ep_group
        mask = self.routing_map.to(torch.uint8)  # not every backend moves booleans
        self._started = (
            start_all_gather(mask, group),
            start_all_gather(probs, group),
            start_all_gather(hidden_states, group),
        )
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pick the rows of the local experts, by expert."""
        started_map, started_probs, started_tokens = self._started
        del self._started
        local = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        local_map = started_map.wait()[:, local].bool().contiguous()
        tokens_per_expert = local_map.sum(0).cpu()
        where, _ = routing_rows(local_map, int(tokens_per_expert.sum()))
        self._rows = where
        local_probs = started_probs.wait()[:, local].reshape(-1)
        self.local_probs = local_probs.index_select(0, where.pair_of_row)
        rows = spread_rows(started_tokens.wait(), where.rows, len(where.rows), where.starts)
        return rows, tokens_per_expert, self.local_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Add up the rows of each token."""
        return gather_rows(hidden_states, self._rows.rows, None, self._rows.starts)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Add up over the ranks, in the precision of the weights, what is for this rank."""
        total = reduce_scatter(hidden_states.to(self.local_probs.dtype), self.tp_ep_group)
        return total.to(hidden_states.dtype)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Restore the shape of the tokens."""
        return hidden_states.view(self.hidden_shape)
