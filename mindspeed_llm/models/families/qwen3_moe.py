"""Qwen3 with experts."""

from collections.abc import Collection
from dataclasses import replace

from mindspeed_llm.models.config import ModelConfig, MoEConfig
from mindspeed_llm.models.families.llama import common_fields, window
from mindspeed_llm.models.families.qwen3 import TABLE as QWEN3
from mindspeed_llm.models.hf_config import MANY, HfConfig
from mindspeed_llm.models.registry import Family
from mindspeed_llm.models.weight_table import TPSplit, copy, stack

_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "router_aux_loss_coef": 0.001,
}

ROUTER = (copy("mlp.router.weight", "mlp.gate.weight", "moe.num_experts", "hidden_size"),)

EXPERT = (
    stack(
        "mlp.experts.{expert}.linear_fc1.weight",
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        "moe.ffn_hidden_size",
        "hidden_size",
    ),
    copy(
        "mlp.experts.{expert}.linear_fc2.weight",
        "mlp.experts.{expert}.down_proj.weight",
        "hidden_size",
        "moe.ffn_hidden_size",
        split=TPSplit.COLUMNS,
    ),
)

TABLE = replace(QWEN3, moe=ROUTER, expert=EXPERT)


def read_config(config: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Read the model configuration from a config.json."""
    fields = common_fields(config, tensors) | {"qk_layernorm": True}
    size, has_window = window(config), config.flag("use_sliding_window", False)
    step, dense = config.integer("decoder_sparse_step", default=1), config.values("mlp_only_layers")
    is_moe = [
        layer not in dense and (layer + 1) % step == 0 for layer in range(fields["num_layers"])
    ]
    moe = MoEConfig(
        num_experts=config.integer("num_experts", "num_local_experts", most=MANY),
        topk=config.integer("num_experts_per_tok"),
        ffn_hidden_size=config.integer("moe_intermediate_size"),
        is_moe_layer=tuple(is_moe),
        normalize_topk=config.flag("norm_topk_prob", False),
        aux_loss_coeff=config.number("router_aux_loss_coef", 0.0),
    )
    fields |= {"sliding_window": size if has_window else None}
    return ModelConfig(family="qwen3_moe", moe=moe, **fields)


FAMILY = Family(
    name="qwen3_moe",
    model_types={"qwen3_moe": _DEFAULTS},
    read_config=read_config,
    table=TABLE,
)
