"""Every rank sends its tokens to the ranks of their experts, and gets the outputs back.

    in flight                        meanwhile
    all-gather of the counts         numbering and copying of the rows, by expert
    all-to-all of tokens, weights    first half of the shared experts; order of the received rows
    all-to-all of the outputs        second half of the shared experts

The counts are read by the host once a layer.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import get_capacity, permute, unpermute
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from mindspeed.distributed.async_collectives import Started, start_all_gather, start_all_to_all
from mindspeed.distributed.collectives import group_rank
from mindspeed.moe.interface import TwoMethods, number_of_rows
from mindspeed.ops.routing_rows.reference import chunk_rows
from mindspeed.ops.token_rows import gather_rows, spread_rows


class AllToAllDispatcher(TwoMethods, MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher with asynchronous collectives: EP all-to-all, then TP all-gather."""

    _counts: Started | None
    _started: tuple[Started, Started]
    _combined: Started
    _order: Tensor | None
    """The received row of each row by local expert; None where they arrive in that order."""

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Copy each token once per expert, by expert."""
        self.hidden_shape = hidden_states.shape
        self.routing_map, self.probs = routing_map, probs
        self._counts = self._start_counts(routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        self.hidden_shape_before_permute = tokens.shape
        # Megatron 0.19 returns two more values, of rows that are padded.
        rows, weights, self.reversed_local_input_permutation_mapping, *_ = permute(
            tokens,
            routing_map,
            probs=probs,
            num_out_tokens=self.num_out_tokens,
            fused=self.config.moe_permute_fusion,
            drop_and_pad=self.drop_and_pad,
        )
        return rows, weights

    def token_dispatch(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Start the all-to-all of tokens and weights."""
        self._finish_counts()
        send, receive = self.input_splits, self.output_splits
        self._started = (
            start_all_to_all(rows, send, receive, self.ep_group),
            start_all_to_all(weights, send, receive, self.ep_group),
        )
        return rows, weights

    def dispatch_postprocess(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort what arrives by local expert."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act()
        self._order = self._number_received(rows.device)
        rows, weights = (started.wait() for started in self._started)
        del self._started
        if self.tp_size > 1:
            rows, weights = (
                gather_from_sequence_parallel_region(
                    x, group=self.tp_group, output_split_sizes=self.output_splits_tp
                )
                for x in (rows, weights)
            )
        return self._sort(rows), self.tokens_per_expert, self._sort(weights)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Restore the order in which the rows arrived, and add up over the TP group."""
        if self.drop_and_pad:
            hidden_states = self._transpose_chunks(hidden_states, self.num_local_experts)
        elif self._order is not None:
            order = self._order.unsqueeze(1)
            hidden_states = spread_rows(hidden_states, order, len(hidden_states))
        if self.tp_size > 1:
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs.dtype),
                group=self.tp_group,
                input_split_sizes=self.output_splits_tp,
            ).to(hidden_states.dtype)
        return hidden_states

    def token_combine(
        self,
        hidden_states: Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> Tensor:
        """Start the all-to-all of the outputs."""
        send, receive = self.output_splits, self.input_splits
        self._combined = start_all_to_all(hidden_states, send, receive, self.ep_group)
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Add up the outputs of each token, and those of the shared experts."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward()
            self.shared_experts.post_forward_comm()
        output = self._add_up(self._combined.wait())
        del self._combined
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    def _add_up(self, rows: Tensor) -> Tensor:
        """Add up the rows of each token of this rank."""
        tokens: Tensor = unpermute(
            rows,
            self.reversed_local_input_permutation_mapping,
            restore_shape=self.hidden_shape_before_permute,
            routing_map=self.routing_map,
            fused=self.config.moe_permute_fusion,
            drop_and_pad=self.drop_and_pad,
        )
        return tokens.view(self.hidden_shape)

    def _start_counts(self, routing_map: Tensor) -> Started | None:
        """Start to gather the tokens for each expert; a fixed capacity needs no collective."""
        if self.drop_and_pad:
            self.capacity = get_capacity(
                num_tokens=len(routing_map) * self.config.moe_router_topk,
                num_experts=self.num_experts,
                capacity_factor=self.moe_expert_capacity_factor,
            )
            self.num_out_tokens = self.capacity * self.num_experts
            received = self.capacity * self.tp_size * self.ep_size
            self.tokens_per_expert = torch.full((self.num_local_experts,), received)
            return None
        counts = routing_map.sum(0)
        num_rows = number_of_rows(self.config, routing_map)
        self.num_out_tokens = int(counts.sum()) if num_rows is None else num_rows
        return start_all_gather(counts, self.tp_ep_group)

    def _finish_counts(self) -> None:
        """Compute the rows for and from each rank."""
        if self._counts is None:
            return
        shape = (self.ep_size, self.tp_size, self.num_experts)
        counts = self._counts.wait().cpu().view(shape)
        self._counts = None
        local = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        received = counts[:, :, local]
        sent = counts[group_rank(self.ep_group), self.tp_rank].view(self.ep_size, -1)
        self.input_splits = sent.sum(1).tolist()
        self.output_splits = received[:, self.tp_rank].sum(1).tolist()
        self.output_splits_tp = received.sum((0, 2)).tolist()
        self.tokens_per_expert = received.sum((0, 1))
        self.num_global_tokens_per_local_expert = received.transpose(0, 1).reshape(-1)

    def _number_received(self, device: torch.device) -> Tensor | None:
        if self.drop_and_pad or self.num_local_experts == 1:
            return None
        sizes = self.num_global_tokens_per_local_expert
        order = self.sort_input_by_local_experts.to(sizes.device)
        return chunk_rows(sizes, order, int(sizes.sum())).to(device, non_blocking=True)

    def _sort(self, x: Tensor) -> Tensor:
        if self.drop_and_pad:
            return self._transpose_chunks(x, self.tp_size * self.ep_size)
        if self._order is None:
            return x
        return gather_rows(x, self._order.unsqueeze(1)) if x.ndim == 2 else x[self._order]

    def _transpose_chunks(self, x: Tensor, num_outer: int) -> Tensor:
        """Swap ranks and local experts: chunks of equal size need no row numbers."""
        chunks = x.unflatten(0, (num_outer, -1, self.capacity))
        return chunks.transpose(0, 1).flatten(0, 2)
