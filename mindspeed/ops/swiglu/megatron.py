"""SwiGLU in the place of Megatron's own fused functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops.swiglu import paired, swiglu
from mindspeed.ops.swiglu.origin import remember, take_ahead


def wrap_bias_swiglu_impl(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute `bias_swiglu_impl` by the operator; storing the input elsewhere stays Megatron's."""

    @functools.wraps(original)
    def bias_swiglu_impl(
        input: Tensor, bias: Tensor | None, fp8_input_store: bool = False, *args: Any, **kwargs: Any
    ) -> Tensor:
        if fp8_input_store or any(args) or any(kwargs.values()):
            return original(input, bias, fp8_input_store, *args, **kwargs)
        ahead = take_ahead(input)
        y = swiglu(input, bias=bias) if ahead is None else paired.swiglu_of(input, ahead)
        return remember(y, input) if bias is None else y

    return bias_swiglu_impl


def wrap_weighted_bias_swiglu_impl(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute `weighted_bias_swiglu_impl`, which experts call with one factor a token."""

    @functools.wraps(original)
    def weighted_bias_swiglu_impl(
        input: Tensor, bias: Tensor | None, weights: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if bias is not None or any(args) or any(kwargs.values()):
            return original(input, bias, weights, *args, **kwargs)
        return swiglu(input, weights=weights.view(*input.shape[:-1], 1))

    return weighted_bias_swiglu_impl


def wrap_mlp_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the first product of an MLP compute SwiGLU as well, if it can and nothing comes between.

    A first product that was exchanged since, as adapters do, is not asked.
    """

    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        per_token_scale: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        ahead = getattr(self.linear_fc1, "swiglu_ahead", None)
        is_next = per_token_scale is None and _is_swiglu_next(self.config)
        if ahead is None or not is_next or torch.compiler.is_compiling():
            return original(self, hidden_states, per_token_scale, *args, **kwargs)
        with ahead():
            return original(self, hidden_states, per_token_scale, *args, **kwargs)

    return forward


def _is_swiglu_next(config: Any) -> bool:
    """Say whether the MLP hands its first product to `bias_swiglu_impl` as wrapped above."""
    offloads = config.cpu_offloading and config.cpu_offloading_activations
    return (
        config.gated_linear_unit
        and config.activation_func is F.silu
        and config.bias_activation_fusion
        and not getattr(config, "use_te_activation_func", False)
        and not (config.add_bias_linear or config.activation_func_fp8_input_store or offloads)
    )
