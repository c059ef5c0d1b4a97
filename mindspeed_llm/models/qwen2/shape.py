"""The shape of a Qwen2 model."""

from collections.abc import Collection

from mindspeed_llm.models.hf_config import HfConfig
from mindspeed_llm.models.llama.shape import common_fields, window_by_layer
from mindspeed_llm.models.shape import ModelShape


def shape(config: HfConfig, tensors: Collection[str]) -> ModelShape:
    """Read the shape; the config does not name the bias that every Qwen2 has."""
    fields = common_fields(config, tensors, has_qkv_bias=True)
    return ModelShape(family="qwen2", sliding_window=window_by_layer(config), **fields)
