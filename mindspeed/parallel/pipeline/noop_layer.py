"""A transformer layer that does nothing, and the wraps that put it into Megatron's models."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


class NoopLayer(MegatronModule):
    """Pass the hidden states on; there are no weights, so checkpoints do not know this layer."""

    def __init__(self, config: Any, layer_number: int, global_number: int, **_: Any) -> None:
        super().__init__(config=config)
        # Megatron passes the number within the stage but reads the number within the model.
        self.layer_number = global_number

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a copy: a stage whose output is its input breaks the pipeline schedules."""
        return hidden_states.clone(), context


def wrap_get_block_submodules(original: Callable[..., Any], layers: Sequence[int]) -> Any:
    """Put a NoopLayer in place of each named layer (numbered from 0 over the whole model)."""

    @functools.wraps(original)
    def _get_block_submodules(config: Any, spec: Any, *stage: Any, **named_stage: Any) -> Any:
        if max(layers) >= config.num_layers:
            raise ValueError(
                f"noop_layers names layer {max(layers)}, but num_layers={config.num_layers} "
                f"allows 0 to {config.num_layers - 1}"
            )
        submodules = original(config, spec, *stage, **named_stage)
        offset = get_transformer_layer_offset(config, *stage, **named_stage)
        specs = [
            _noop_spec(number) if number in layers else layer_spec
            for number, layer_spec in enumerate(submodules.layer_specs, start=offset)
        ]
        return dataclasses.replace(submodules, layer_specs=specs)

    return _get_block_submodules


def _noop_spec(number: int) -> ModuleSpec:
    return ModuleSpec(module=NoopLayer, params={"global_number": number + 1})


def wrap_sharded_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Save each layer under its own name instead of stacking all layers in one tensor."""

    @functools.wraps(original)
    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> Any:
        metadata = {**(metadata or {}), "non_homogeneous_layers": True}
        return original(self, prefix, sharded_offsets, metadata)

    return sharded_state_dict


def wrap_num_floating_point_operations(original: Callable[..., Any], layers: Sequence[int]) -> Any:
    """Count the operations of the layers that are left."""

    @functools.wraps(original)
    def num_floating_point_operations(args: Any, *rest: Any, **named_rest: Any) -> Any:
        return original(_without(args, layers), *rest, **named_rest)

    return num_floating_point_operations


def _without(args: Any, layers: Sequence[int]) -> Any:
    """Return the arguments of the same model without the named layers."""
    left = copy.copy(args)
    left.num_layers = args.num_layers - len(layers)
    frequency = getattr(args, "moe_layer_freq", None)
    if frequency is not None:
        is_moe = frequency
        if isinstance(frequency, int):
            is_moe = [int(number % frequency == 0) for number in range(args.num_layers)]
        left.moe_layer_freq = [kind for i, kind in enumerate(is_moe) if i not in layers]
    return left
