"""Gradients that Megatron adds up wrongly over tensor-parallel ranks, put right by hooks."""

from typing import Any

import torch

from mindspeed_llm.models.config import ModelConfig


def correct_gradients(model: Any, model_config: ModelConfig) -> None:
    """Register the hooks that a model needs under tensor parallelism."""
    from megatron.core.transformer import multi_token_prediction

    size = None if model_config.mla is None else model_config.mla.kv_down_size
    # A gather whose backward pass adds up gradients, all of which are whole already.
    sums = hasattr(multi_token_prediction, "all_gather_last_dim_from_tensor_parallel_region")
    for name, module in model.named_modules():
        if size is not None and name.endswith(".linear_kv_down_proj"):
            _return_rows(module, size)
        elif name.endswith(".core_attention"):
            _mark_sinks(module)
        elif sums and name.startswith("mtp.") and name.endswith(".eh_proj"):
            _divide_gradient(module)


def _return_rows(linear: Any, size: int) -> None:
    """Let a projection to latent keys and values return whole rows of a rank's tokens.

    Where its columns are split over ranks (0.12, and local layers), Megatron gathers them by a
    function that adds up no gradients: those of the rotated part of keys, which all heads share,
    would be of a rank's own heads only. Whole rows it gathers by one that does.
    """
    from megatron.core.tensor_parallel import (
        gather_from_tensor_model_parallel_region,
        scatter_to_sequence_parallel_region,
    )

    def rows(layer: Any, _: Any, output: tuple[Any, Any]) -> tuple[Any, Any]:
        out, bias = output
        if out.size(-1) == size or not layer.sequence_parallel:  # off while tokens are decoded
            return output
        whole = gather_from_tensor_model_parallel_region(out)
        return scatter_to_sequence_parallel_region(whole), bias

    linear.register_forward_hook(rows)


def _mark_sinks(attention: Any) -> None:
    """Mark sinks as split over ranks, of which gradient norms would count the first only."""
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    sinks = getattr(attention, "softmax_offset", None)
    if isinstance(sinks, torch.nn.Parameter) and not hasattr(sinks, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(sinks, True, 0, 1)


def _divide_gradient(linear: Any) -> None:
    from megatron.core import parallel_state

    ranks = parallel_state.get_tensor_model_parallel_world_size()

    def divide(layer: Any, _: Any, output: tuple[Any, Any]) -> None:
        if ranks > 1 and output[0].requires_grad:
            output[0].register_hook(lambda gradient: gradient / ranks)

    linear.register_forward_hook(divide)
