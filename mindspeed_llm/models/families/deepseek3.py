"""DeepSeek-V3 and R1: V2 with sigmoid routing, a routing bias and multi-token prediction."""

from collections.abc import Collection
from dataclasses import replace

from mindspeed.config import ConfigError
from mindspeed_llm.models.config import ModelConfig, MoEConfig
from mindspeed_llm.models.families.deepseek2 import TABLE as DEEPSEEK2
from mindspeed_llm.models.families.deepseek2 import expert_fields, latent_fields, only
from mindspeed_llm.models.hf_config import HfConfig
from mindspeed_llm.models.registry import Family
from mindspeed_llm.models.weight_table import TPSplit, copy

_DEFAULTS = {
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}

_ROUTING_BIAS = copy(
    "mlp.router.expert_bias",
    "mlp.gate.e_score_correction_bias",
    "moe.num_experts",
    is_float32=True,
)

TABLE = replace(
    DEEPSEEK2,
    moe=(*DEEPSEEK2.moe, _ROUTING_BIAS),
    mtp=(
        copy("enorm.weight", "enorm.weight", "hidden_size"),
        copy("hnorm.weight", "hnorm.weight", "hidden_size"),
        copy("eh_proj.weight", "eh_proj.weight", "hidden_size", "two_hidden", split=TPSplit.ROWS),
        copy("final_layernorm.weight", "shared_head.norm.weight", "hidden_size"),
    ),
    mtp_copies=(
        ("embed_tokens.weight", "embedding.word_embeddings.weight"),
        ("shared_head.head.weight", "output_layer.weight"),
    ),
)


def read_config(config: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Read the model configuration from a config.json."""
    if not config.flag("rope_interleave", True):
        raise ConfigError(f"{config.source}: rope_interleave is false: Megatron interleaves in MLA")
    only(config, "scoring_func", "sigmoid")
    only(config, "topk_method", "noaux_tc")
    fields = latent_fields(config, tensors)
    moe = MoEConfig(
        **expert_fields(config, fields["num_layers"]),
        score_function="sigmoid",
        normalize_topk=config.flag("norm_topk_prob", True),
        num_groups=config.integer("n_group", default=1),
        group_topk=config.integer("topk_group", default=1),
        expert_bias=True,
    )
    return ModelConfig(family="deepseek3", moe=moe, **fields)


FAMILY = Family(
    name="deepseek3",
    model_types={"deepseek_v3": _DEFAULTS},
    aliases=("deepseek_v3", "deepseek_r1"),
    read_config=read_config,
    table=TABLE,
    # The sum of two others; balancing by a bias has no auxiliary loss.
    ignored=("qk_head_dim", "aux_loss_alpha", "seq_aux"),
)
