"""The shape of a DeepSeek model with latent attention."""

from collections.abc import Collection
from typing import Any

from mindspeed.config import ConfigError
from mindspeed_llm.models.hf_config import MANY, HfConfig
from mindspeed_llm.models.llama.shape import common_fields
from mindspeed_llm.models.shape import MlaShape, ModelShape, MoeShape


def shape(config: HfConfig, tensors: Collection[str]) -> ModelShape:
    """Read the shape of a DeepSeek-V2 model."""
    fields = latent_fields(config, tensors)
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"{config.source}: topk_method is {method!r}: it is not known")
    groups = {
        "num_groups": config.integer("n_group", default=1),
        "group_topk": config.integer("topk_group", default=1),
    }
    if method == "greedy":
        groups = {}
    only(config, "scoring_func", "softmax")
    # Transformers does not normalize in DeepSeek-V2, whatever the config says; its authors' code
    # does.
    only(config, "norm_topk_prob", False)
    moe = MoeShape(
        **expert_fields(config, fields["num_layers"]),
        **groups,
        group_score="max",
        normalize_topk=False,
        aux_loss_coeff=config.number("aux_loss_alpha", 0.0),
    )
    return ModelShape(family="deepseek2", moe=moe, **fields)


def only(config: HfConfig, name: str, allowed: Any) -> None:
    """Raise if a key has another value than the one that the family computes with."""
    if (value := config.get(name, allowed)) != allowed:
        raise ConfigError(f"{config.source}: {name} is {value!r:.40}: only {allowed} is supported")


def latent_fields(config: HfConfig, tensors: Collection[str]) -> dict[str, Any]:
    """Return the fields outside the experts."""
    mla = MlaShape(
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
    """Return the fields of MoeShape that V2 and V3 name alike."""
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
