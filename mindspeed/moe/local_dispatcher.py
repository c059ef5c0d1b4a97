"""A dispatcher for experts that are all on this rank: it numbers rows and moves nothing.

The experts gather the tokens and add their rows up by these numbers. Nothing waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from mindspeed.moe.interface import CombinedByExperts, TwoMethods, number_of_rows
from mindspeed.ops.expert_mlp import quack_impl
from mindspeed.ops.expert_mlp.reference import ExpertRows, number_rows


class LocalDispatcher(CombinedByExperts, TwoMethods):
    """The interface of Megatron's dispatchers; `rows` takes the place of the counts."""

    _rows: ExpertRows

    def __init__(self, config: Any, shared_experts: Any = None) -> None:
        self.config, self.shared_experts = config, shared_experts

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Number the rows; return the tokens (T, H) and the weight of each row."""
        self.hidden_shape = hidden_states.shape
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        num_rows = number_of_rows(self.config, routing_map)
        self._rows, pairs = number_rows(routing_map, num_rows)
        weights = probs.reshape(-1).index_select(0, pairs)
        return hidden_states.view(-1, self.hidden_shape[-1]), weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """All experts are here."""
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, ExpertRows, Tensor]:
        """Leave the gathering to the experts."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act()
        return hidden_states, self._rows, probs

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Megatron 0.19 asks where outputs and gradients of experts go: wherever they like."""
        return None, None

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Add the output of shared experts that run beside the others."""
        output = hidden_states.view(self.hidden_shape)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward()
            self.shared_experts.post_forward_comm()
            output = output + self.shared_experts.get_output()
        return output


def wrap_layer_init(
    original: Callable[..., None], find_need: Callable[[Callable[[str], Any]], str | None]
) -> Callable[..., None]:
    """Give a layer with all experts on this rank, built to gather tokens, this dispatcher.

    `find_need` names what it needs and Megatron's config, which it reads by name, does not give.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        is_fused = getattr(self.experts, "fused_linears", None) is not None
        if is_fused and _is_local(self) and not find_need(partial(_field, self.config)):
            overlapped = self.shared_experts if self.shared_expert_overlap else None
            self.token_dispatcher = LocalDispatcher(self.config, overlapped)
            linear = self.experts.linear_fc2
            quack_impl.prepare(
                *(self.config.params_dtype, linear.out_features, linear.in_features),
                is_gathered=True,
            )

    return __init__


def _is_local(layer: Any) -> bool:
    config = layer.config
    has_all = layer.num_local_experts == config.num_moe_experts
    return bool(has_all and config.expert_tensor_parallel_size == 1)


def _field(config: Any, name: str) -> Any:
    return getattr(config, name, None)
