"""The shape of a DeepSeek-V3 model."""

from collections.abc import Collection

from mindspeed.config import ConfigError
from mindspeed_llm.models.deepseek2.shape import expert_fields, latent_fields, only
from mindspeed_llm.models.hf_config import HfConfig
from mindspeed_llm.models.shape import ModelShape, MoeShape


def shape(config: HfConfig, tensors: Collection[str]) -> ModelShape:
    """Read the shape from a config.json."""
    if not config.flag("rope_interleave", True):
        raise ConfigError(f"{config.source}: rope_interleave is false: Megatron interleaves in MLA")
    only(config, "scoring_func", "sigmoid")
    only(config, "topk_method", "noaux_tc")
    fields = latent_fields(config, tensors)
    moe = MoeShape(
        **expert_fields(config, fields["num_layers"]),
        score_function="sigmoid",
        normalize_topk=config.flag("norm_topk_prob", True),
        num_groups=config.integer("n_group", default=1),
        group_topk=config.integer("topk_group", default=1),
        expert_bias=True,
    )
    return ModelShape(family="deepseek3", moe=moe, **fields)
