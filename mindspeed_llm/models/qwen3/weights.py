"""Qwen3's weight names."""

from dataclasses import replace

from mindspeed_llm.models.llama.weights import TABLE as LLAMA
from mindspeed_llm.models.rules import copy

HEAD_NORMS = (
    copy("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "kv_channels"),
    copy("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "kv_channels"),
)

TABLE = replace(LLAMA, layer=LLAMA.layer + HEAD_NORMS)
