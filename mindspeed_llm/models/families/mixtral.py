"""Mixtral: Llama's attention with experts in every layer."""

from collections.abc import Collection
from dataclasses import replace

from mindspeed_llm.models.config import ModelConfig, MoEConfig
from mindspeed_llm.models.families.llama import TABLE as LLAMA
from mindspeed_llm.models.families.llama import common_fields, window
from mindspeed_llm.models.hf_config import MANY, HfConfig
from mindspeed_llm.models.registry import Family
from mindspeed_llm.models.weight_table import TPSplit, copy, stack

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.001,
}

_EXPERT = "block_sparse_moe.experts.{expert}."

TABLE = replace(
    LLAMA,
    fused_names=(("block_sparse_moe.", "mlp."),),
    moe=(
        copy("mlp.router.weight", "block_sparse_moe.gate.weight", "moe.num_experts", "hidden_size"),
    ),
    expert=(
        stack(
            "mlp.experts.{expert}.linear_fc1.weight",
            (_EXPERT + "w1.weight", _EXPERT + "w3.weight"),
            "moe.ffn_hidden_size",
            "hidden_size",
        ),
        copy(
            "mlp.experts.{expert}.linear_fc2.weight",
            _EXPERT + "w2.weight",
            "hidden_size",
            "moe.ffn_hidden_size",
            split=TPSplit.COLUMNS,
        ),
    ),
)


def read_config(config: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Read the model configuration from a config.json."""
    fields = common_fields(config, tensors)
    moe = MoEConfig(
        num_experts=config.integer("num_local_experts", "num_experts", most=MANY),
        topk=config.integer("num_experts_per_tok"),
        ffn_hidden_size=fields["ffn_hidden_size"],
        is_moe_layer=(True,) * fields["num_layers"],
        aux_loss_coeff=config.number("router_aux_loss_coef", 0.0),
    )
    return ModelConfig(family="mixtral", moe=moe, sliding_window=window(config), **fields)


FAMILY = Family(
    name="mixtral", model_types={"mixtral": _DEFAULTS}, read_config=read_config, table=TABLE
)
