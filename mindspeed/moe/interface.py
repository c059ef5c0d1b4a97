"""The interface of Megatron's token dispatchers, which differs between its versions."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def number_of_rows(config: Any, routing_map: Tensor) -> int | None:
    """Return the pairs of tokens and experts; None where only the device knows how many.

    A capacity drops some; Megatron's inference sets one once models are built, to pad experts in
    decoding. Choices that are replayed may name an expert twice, as those of padding do.
    """
    is_replayed = getattr(config, "moe_enable_routing_replay", False)
    if is_replayed or config.moe_expert_capacity_factor is not None:
        return None
    return len(routing_map) * int(config.moe_router_topk)


class TwoMethods:
    """The two methods that Megatron 0.12 calls, in terms of the six that later releases call."""

    def token_permutation(
        self: Any, hidden_states: Tensor, probs: Tensor, routing_map: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens of the local experts, their number for each, and their weights."""
        prepared = self.dispatch_preprocess(hidden_states, routing_map, probs)
        dispatched: tuple[Tensor, Tensor, Tensor] = self.dispatch_postprocess(
            *self.token_dispatch(*prepared)
        )
        return dispatched

    def token_unpermutation(
        self: Any, hidden_states: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return the sum of the experts' outputs for each token."""
        assert bias is None, "experts with a bias add it themselves"
        combined = self.token_combine(self.combine_preprocess(hidden_states))
        return self.combine_postprocess(combined), None


class CombinedByExperts:
    """The half of a dispatcher that experts do themselves: they return this rank's own rows."""

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Leave the rows as they are."""
        return hidden_states

    def token_combine(
        self,
        hidden_states: Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> Tensor:
        """Send nothing."""
        return hidden_states
