"""Whether a row may hold several samples, each seen by itself only."""

import inspect
from collections.abc import Callable
from typing import Any

from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.training.options import TrainOptions

SINGLE = "takes rows of one sample only"


def why_not_joined(options: TrainOptions, shape: ModelConfig) -> str | None:
    """Return what takes rows of one sample only, and what to use instead; None if nothing does."""
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    # Earlier releases do not say to these where documents are.
    rolls_rows = not _takes(roll_tensor, "packed_seq_params")
    slices_rows = options.context_parallel_size > 1 and not _takes(
        YarnRotaryEmbedding.forward, "packed_seq"
    )
    if options.transformer_impl == "local":
        return f"--transformer-impl local {SINGLE}: use transformer_engine"
    if shape.mtp_num_layers and rolls_rows:
        return f"multi-token prediction of this megatron-core {SINGLE}: use megatron-core 0.16"
    if shape.mla and shape.rotary.scaling == "yarn" and slices_rows:
        return (
            "YaRN of this megatron-core, with latent attention and --context-parallel-size, "
            f"{SINGLE}: use megatron-core 0.16, or --context-parallel-size 1"
        )
    return None


def has_shortest_rows(options: TrainOptions, shape: ModelConfig) -> bool:
    """Return whether neither --variable-seq-lengths nor packed rows would be less padded.

    Attention with sinks refuses both.
    """
    is_single = why_not_joined(options, shape) is not None
    return shape.attention_sinks or (options.variable_seq_lengths and is_single)


def _takes(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters
