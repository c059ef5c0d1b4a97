"""The interface of Megatron's token dispatchers, which differs between its versions."""

from __future__ import annotations

from typing import Any

from torch import Tensor


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
