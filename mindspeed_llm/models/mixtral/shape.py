"""The shape of a Mixtral model."""

from collections.abc import Collection

from mindspeed_llm.models.hf_config import MANY, HfConfig
from mindspeed_llm.models.llama.shape import common_fields, window
from mindspeed_llm.models.shape import ModelShape, MoeShape


def shape(config: HfConfig, tensors: Collection[str]) -> ModelShape:
    """Read the shape from a config.json."""
    fields = common_fields(config, tensors)
    moe = MoeShape(
        num_experts=config.integer("num_local_experts", "num_experts", most=MANY),
        topk=config.integer("num_experts_per_tok"),
        ffn_hidden_size=fields["ffn_hidden_size"],
        is_moe_layer=(True,) * fields["num_layers"],
        aux_loss_coeff=config.number("router_aux_loss_coef", 0.0),
    )
    return ModelShape(family="mixtral", moe=moe, sliding_window=window(config), **fields)
