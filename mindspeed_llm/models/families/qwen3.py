"""Qwen3: Llama's layers with normalized query and key heads."""

from collections.abc import Collection
from dataclasses import replace

from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.families.llama import TABLE as LLAMA
from mindspeed_llm.models.families.llama import common_fields, window_by_layer
from mindspeed_llm.models.families.qwen2 import DEFAULTS as QWEN2
from mindspeed_llm.models.hf_config import HfConfig
from mindspeed_llm.models.registry import Family
from mindspeed_llm.models.weight_table import copy

HEAD_NORMS = (
    copy("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "kv_channels"),
    copy("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "kv_channels"),
)

TABLE = replace(LLAMA, layer=LLAMA.layer + HEAD_NORMS)


def read_config(config: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Read the model configuration from a config.json."""
    fields = common_fields(config, tensors) | {"qk_layernorm": True}
    return ModelConfig(family="qwen3", sliding_window=window_by_layer(config), **fields)


FAMILY = Family(
    name="qwen3",
    model_types={"qwen3": {**QWEN2, "head_dim": 128}},
    read_config=read_config,
    table=TABLE,
)
