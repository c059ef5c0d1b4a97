"""MLPs that run over the sequence tile by tile, so that what they hold does not grow with it.

Every tile keeps its part of the input and nothing else: its first linear and activation function
are computed again in backward, tile by tile, the last first. Where the norm is part of the first
linear, the residual sum keeps that input anyhow. Weight gradients are sums over tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed.memory.recompute_layers import MarkedMlp


def wrap_transformer_block_init(original: Callable[..., None], size: int) -> Callable[..., None]:
    """Let the dense MLPs of a new block run over tiles of `size` positions."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.core.transformer.mlp import MLP

        original(self, *args, **kwargs)
        for layer in self.layers:
            mlp = getattr(layer, "mlp", None)
            if isinstance(mlp, MLP):
                # On the instance: outside of every other form of the forward, fused ones included.
                mlp.forward = functools.partial(forward_in_tiles, mlp, mlp.forward, size)

    return init


def forward_in_tiles(
    mlp: Any, whole: Callable[..., Any], size: int, hidden_states: Tensor, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Return output and bias of an MLP for hidden states (S, B, H), `size` of S at a time.

    Args:
        mlp: the module.
        whole: its own forward.
        size: positions of a tile.
        hidden_states: the input.
        kwargs: what layers pass to every kind of MLP; a dense one uses none of it.
    """
    assert kwargs.get("per_token_scale") is None, "scales of experts' tokens are not cut into tiles"
    if len(hidden_states) <= size or torch.compiler.is_compiling():
        result: tuple[Tensor, Any] = whole(hidden_states, **kwargs)
        return result
    forward, bias = type(mlp).forward, None
    outputs = []
    for tile in hidden_states.split(size):
        if torch.is_grad_enabled():
            with MarkedMlp(mlp, forward, from_input=True) as marked:
                output, bias = forward(marked, tile, **kwargs)
        else:
            output, bias = whole(tile, **kwargs)
        outputs.append(output)
    return torch.cat(outputs), bias
