"""The shape of a Qwen3-MoE model."""

from collections.abc import Collection

from mindspeed_llm.models.hf_config import MANY, HfConfig
from mindspeed_llm.models.llama.shape import common_fields, window
from mindspeed_llm.models.shape import ModelShape, MoeShape


def shape(config: HfConfig, tensors: Collection[str]) -> ModelShape:
    """Read the shape from a config.json."""
    fields = common_fields(config, tensors) | {"qk_layernorm": True}
    size, has_window = window(config), config.flag("use_sliding_window", False)
    step, dense = config.integer("decoder_sparse_step", default=1), config.values("mlp_only_layers")
    is_moe = [
        layer not in dense and (layer + 1) % step == 0 for layer in range(fields["num_layers"])
    ]
    moe = MoeShape(
        num_experts=config.integer("num_experts", "num_local_experts", most=MANY),
        topk=config.integer("num_experts_per_tok"),
        ffn_hidden_size=config.integer("moe_intermediate_size"),
        is_moe_layer=tuple(is_moe),
        normalize_topk=config.flag("norm_topk_prob", False),
        aux_loss_coeff=config.number("router_aux_loss_coef", 0.0),
    )
    fields |= {"sliding_window": size if has_window else None}
    return ModelShape(family="qwen3_moe", moe=moe, **fields)
