"""Mark experts whose tensor parallelism is not that of the other layers.

Megatron reduces the gradients of a parameter with `allreduce = False` over the ranks that hold the
same expert, and all others over data-parallel ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def wrap_data_parallel(original: Callable[..., None]) -> Callable[..., None]:
    """Mark the experts of a model before its gradients are shared out."""

    @functools.wraps(original)
    def __init__(self: Any, config: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        mark(module)
        original(self, config, module, *args, **kwargs)

    return __init__


def mark(model: nn.Module) -> None:
    """Mark the experts of every layer whose tensor parallelism is one of their own."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    for layer in model.modules():
        experts = getattr(layer, "experts", None)
        if isinstance(layer, BaseMoELayer) and experts is not None and _are_apart(layer.config):
            is_whole = layer.config.expert_tensor_parallel_size == 1
            for parameter in experts.parameters():
                parameter.allreduce = False
                # The norm of the gradient asks for the rank among tensor-parallel ranks, which
                # says nothing about whole experts: each of them counts.
                if is_whole:
                    parameter.tensor_model_parallel = True


def _are_apart(config: Any) -> bool:
    """With expert parallelism Megatron marks experts itself."""
    size = config.expert_tensor_parallel_size
    is_alone = config.expert_model_parallel_size == 1
    return is_alone and size is not None and size != config.tensor_model_parallel_size
