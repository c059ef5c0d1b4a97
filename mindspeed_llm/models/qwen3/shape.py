"""The shape of a Qwen3 model."""

from collections.abc import Collection

from mindspeed_llm.models.hf_config import HfConfig
from mindspeed_llm.models.llama.shape import common_fields, window_by_layer
from mindspeed_llm.models.shape import ModelShape


def shape(config: HfConfig, tensors: Collection[str]) -> ModelShape:
    """Read the shape from a config.json."""
    fields = common_fields(config, tensors) | {"qk_layernorm": True}
    return ModelShape(family="qwen3", sliding_window=window_by_layer(config), **fields)
