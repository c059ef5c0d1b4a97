"""gpt-oss: attention with sinks and a window in every other layer, experts with biases.

The gate of an expert is clamped, its sigmoid has a gain, and the linear half an offset of one: what
Megatron calls quick GELU with a clamp and an offset. HF tensors hold all experts of a layer.
"""

from collections.abc import Collection
from dataclasses import replace

from mindspeed.config import ConfigError
from mindspeed_llm.models.config import ModelConfig, MoEConfig
from mindspeed_llm.models.families.llama import TABLE as LLAMA
from mindspeed_llm.models.families.llama import common_fields, window
from mindspeed_llm.models.hf_config import MANY, HfConfig
from mindspeed_llm.models.registry import Family
from mindspeed_llm.models.weight_table import HfView, TPSplit, copy, interleave

QUICK_GELU_GAIN = 1.702
_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "router_aux_loss_coef": 0.001,
    "attention_bias": True,
    "mlp_bias": True,  # of its experts, which has no key of its own
    "tie_word_embeddings": False,
}

TABLE = replace(
    LLAMA,
    layer=(
        *LLAMA.layer,
        copy(
            "self_attention.core_attention.softmax_offset",
            "self_attn.sinks",
            "num_attention_heads",
            split=TPSplit.ROWS,
        ),
    ),
    moe=(
        copy("mlp.router.weight", "mlp.router.weight", "moe.num_experts", "hidden_size"),
        copy("mlp.router.bias", "mlp.router.bias", "moe.num_experts"),
    ),
    expert=(
        interleave(
            "mlp.experts.{expert}.linear_fc1.weight",
            "mlp.experts.gate_up_proj",
            "moe.ffn_hidden_size",
            "hidden_size",
        ),
        interleave(
            "mlp.experts.{expert}.linear_fc1.bias",
            "mlp.experts.gate_up_proj_bias",
            "moe.ffn_hidden_size",
        ),
        copy(
            "mlp.experts.{expert}.linear_fc2.weight",
            "mlp.experts.down_proj",
            "hidden_size",
            "moe.ffn_hidden_size",
            split=TPSplit.COLUMNS,
            is_stacked=True,
        ),
        copy(
            "mlp.experts.{expert}.linear_fc2.bias",
            "mlp.experts.down_proj_bias",
            "hidden_size",
            is_stacked=True,
        ),
    ),
    hf_views=(
        (".gate_up_proj", HfView(has_pairs=True, order=(0, 3, 2, 1))),
        (".gate_up_proj_bias", HfView(has_pairs=True, order=(0, 2, 1))),
        (".down_proj", HfView(has_pairs=False, order=(0, 2, 1))),
    ),
)


def read_config(config: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Read the model configuration from a config.json."""
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        raise ConfigError(f"{config.source}: rope_parameters is missing")
    gain = config.number("swiglu_alpha", QUICK_GELU_GAIN)
    if gain != QUICK_GELU_GAIN:
        raise ConfigError(
            f"{config.source}: swiglu_alpha is {gain:g}: only {QUICK_GELU_GAIN}, which Megatron's "
            "quick GELU has, is supported"
        )
    # Biases are found by the names of a dense MLP's, which experts' are not.
    fields = common_fields(config, ())
    moe = MoEConfig(
        num_experts=config.integer("num_local_experts", "num_experts", most=MANY),
        topk=config.integer("num_experts_per_tok"),
        ffn_hidden_size=fields["ffn_hidden_size"],
        is_moe_layer=(True,) * fields["num_layers"],
        aux_loss_coeff=config.number("router_aux_loss_coef", 0.0),
    )
    return ModelConfig(
        family="gpt_oss",
        moe=moe,
        attention_sinks=True,
        swiglu_limit=config.positive("swiglu_limit", 7.0),
        sliding_window=window(config),
        window_layers=_window_layers(config, fields["num_layers"]),
        **fields,
    )


def _window_layers(config: HfConfig, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has the window; without a list every other one has."""
    kinds = {"sliding_attention": True, "full_attention": False}
    given = config.values("layer_types") or list(kinds) * num_layers
    given = given[:num_layers]
    if len(given) < num_layers or not set(map(str, given)) <= kinds.keys():
        raise ConfigError(
            f"{config.source}: layer_types must name {' or '.join(kinds)} for each of the "
            f"{num_layers} layers"
        )
    return tuple(kinds[str(kind)] for kind in given)


FAMILY = Family(
    name="gpt_oss",
    model_types={"gpt_oss": _DEFAULTS},
    read_config=read_config,
    table=TABLE,
    # Two keys of the published files that repeat others.
    ignored=("initial_context_length", "experts_per_token"),
)
