"""DeepSeek-V2 and V2-Lite: latent attention, routed and shared experts."""

from collections.abc import Collection
from typing import Any

from mindspeed.config import ConfigError
from mindspeed_llm.models.config import MLAConfig, ModelConfig, MoEConfig
from mindspeed_llm.models.families.llama import ATTENTION, MLP, MODEL, NORMS, common_fields
from mindspeed_llm.models.families.qwen3_moe import EXPERT, ROUTER
from mindspeed_llm.models.hf_config import MANY, HfConfig
from mindspeed_llm.models.registry import Family
from mindspeed_llm.models.weight_table import TPSplit, WeightTable, copy, stack

_OUTPUT = tuple(rule for rule in ATTENTION if "linear_proj" in rule.mcore)

LATENT_ATTENTION = (
    copy(
        "self_attention.linear_q_proj.weight",
        "self_attn.q_proj.weight",
        "query_size",
        "hidden_size",
        split=TPSplit.ROWS,
        when="q_is_direct",
    ),
    copy(
        "self_attention.linear_q_down_proj.weight",
        "self_attn.q_a_proj.weight",
        "mla.q_lora_rank",
        "hidden_size",
        split=TPSplit.ROWS,
        when="q_is_compressed",
    ),
    copy(
        "self_attention.q_layernorm.weight",
        "self_attn.q_a_layernorm.weight",
        "mla.q_lora_rank",
        when="q_is_compressed",
    ),
    copy(
        "self_attention.linear_q_up_proj.weight",
        "self_attn.q_b_proj.weight",
        "query_size",
        "mla.q_lora_rank",
        split=TPSplit.ROWS,
        when="q_is_compressed",
    ),
    copy(
        "self_attention.linear_kv_down_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "mla.kv_down_size",
        "hidden_size",
        split=TPSplit.ROWS,
    ),
    copy(
        "self_attention.kv_layernorm.weight",
        "self_attn.kv_a_layernorm.weight",
        "mla.kv_lora_rank",
    ),
    copy(
        "self_attention.linear_kv_up_proj.weight",
        "self_attn.kv_b_proj.weight",
        "kv_up_size",
        "mla.kv_lora_rank",
        split=TPSplit.ROWS,
    ),
    *_OUTPUT,
)

SHARED_EXPERTS = (
    stack(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        "moe.shared_ffn_hidden_size",
        "hidden_size",
        when="moe.shared_ffn_hidden_size",
    ),
    copy(
        "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_experts.down_proj.weight",
        "hidden_size",
        "moe.shared_ffn_hidden_size",
        split=TPSplit.COLUMNS,
        when="moe.shared_ffn_hidden_size",
    ),
)

TABLE = WeightTable(
    model=MODEL,
    layer=NORMS + LATENT_ATTENTION,
    dense=MLP,
    moe=ROUTER + SHARED_EXPERTS,
    expert=EXPERT,
)


def read_config(config: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Read the model configuration from a config.json."""
    fields = latent_fields(config, tensors)
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"{config.source}: topk_method is {method!r}: it is not known")
    groups: dict[str, Any] = {
        "num_groups": config.integer("n_group", default=1),
        "group_topk": config.integer("topk_group", default=1),
    }
    if method == "greedy":
        groups = {}
    only(config, "scoring_func", "softmax")
    # Transformers does not normalize in DeepSeek-V2, whatever the config says; its authors' code
    # does.
    only(config, "norm_topk_prob", False)
    moe = MoEConfig(
        **expert_fields(config, fields["num_layers"]),
        **groups,
        group_score="max",
        normalize_topk=False,
        aux_loss_coeff=config.number("aux_loss_alpha", 0.0),
    )
    return ModelConfig(family="deepseek2", moe=moe, **fields)


def only(config: HfConfig, name: str, allowed: Any) -> None:
    """Raise if a key has another value than the one that the family computes with."""
    if (value := config.get(name, allowed)) != allowed:
        raise ConfigError(f"{config.source}: {name} is {value!r:.40}: only {allowed} is supported")


def latent_fields(config: HfConfig, tensors: Collection[str]) -> dict[str, Any]:
    """Return the fields outside the experts."""
    mla = MLAConfig(
        q_lora_rank=config.integer("q_lora_rank") if config.get("q_lora_rank") else None,
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_head_dim=config.integer("qk_nope_head_dim"),
        qk_pos_emb_head_dim=config.integer("qk_rope_head_dim"),
        v_head_dim=config.integer("v_head_dim"),
    )
    fields = common_fields(config, tensors)
    heads = fields["num_attention_heads"]
    special = {"num_query_groups": heads, "kv_channels": mla.v_head_dim, "qk_layernorm": True}
    return fields | special | {"mla": mla, "mtp_num_layers": _mtp_layers(config, tensors)}


def expert_fields(config: HfConfig, num_layers: int) -> dict[str, Any]:
    """Return the fields of MoEConfig that V2 and V3 share."""
    first = config.integer("first_k_dense_replace", default=0, least=0)
    step = config.integer("moe_layer_freq", default=1)
    width = config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts", default=0, least=0)
    return {
        "num_experts": config.integer("n_routed_experts", most=MANY),
        "topk": config.integer("num_experts_per_tok"),
        "ffn_hidden_size": width,
        "is_moe_layer": tuple(i >= first and i % step == 0 for i in range(num_layers)),
        "shared_ffn_hidden_size": width * shared if shared else None,
        "topk_scaling_factor": config.number("routed_scaling_factor", 1.0),
    }


def _mtp_layers(config: HfConfig, tensors: Collection[str]) -> int:
    """Count the layers of multi-token prediction whose weights are there."""
    layers = config.integer("num_hidden_layers", most=MANY)
    named = config.integer("num_nextn_predict_layers", default=0, least=0, most=MANY)
    return sum(f"model.layers.{layers + i}.eh_proj.weight" in tensors for i in range(named))


FAMILY = Family(
    name="deepseek2",
    model_types={"deepseek_v2": {"n_shared_experts": 2, "q_lora_rank": 1536}},
    aliases=("deepseek2_lite", "deepseek_v2"),
    read_config=read_config,
    table=TABLE,
    ignored=("qk_head_dim", "seq_aux"),  # the sum of two others; a way to average aux_loss_alpha
)
