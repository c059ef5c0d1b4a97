"""Qwen2 and Qwen2.5: Llama's layers with a bias on query, key and value."""

from collections.abc import Collection

from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.families.llama import TABLE, common_fields, window_by_layer
from mindspeed_llm.models.hf_config import HfConfig
from mindspeed_llm.models.registry import Family

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def read_config(config: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Read the model configuration; config.json does not name the bias of query, key and value."""
    fields = common_fields(config, tensors, has_qkv_bias=True)
    return ModelConfig(family="qwen2", sliding_window=window_by_layer(config), **fields)


FAMILY = Family(
    name="qwen2",
    model_types={"qwen2": DEFAULTS},
    aliases=("qwen25", "qwen2.5"),
    read_config=read_config,
    table=TABLE,
)
