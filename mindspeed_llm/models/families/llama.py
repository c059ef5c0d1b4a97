"""Llama 2 and 3, SmolLM2, Mistral and everything else with Llama's layers."""

from collections.abc import Collection
from typing import Any

from mindspeed.config import ConfigError
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.hf_config import MANY, HfConfig
from mindspeed_llm.models.registry import Family
from mindspeed_llm.models.weight_table import TPSplit, WeightTable, copy, qkv, stack

MODEL = (
    copy(
        "embedding.word_embeddings.weight",
        "model.embed_tokens.weight",
        "vocab_size",
        "hidden_size",
        split=TPSplit.VOCABULARY,
    ),
    copy("decoder.final_layernorm.weight", "model.norm.weight", "hidden_size"),
    copy(
        "output_layer.weight",
        "lm_head.weight",
        "vocab_size",
        "hidden_size",
        split=TPSplit.VOCABULARY,
        when="has_output_weights",
    ),
    copy("output_layer.weight", "score.weight", "num_labels", "hidden_size", when="num_labels"),
)

NORMS = (
    copy("input_layernorm.weight", "input_layernorm.weight", "hidden_size"),
    copy("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden_size"),
)

ATTENTION = (
    qkv(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "hidden_size",
    ),
    qkv(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        when="qkv_bias",
    ),
    copy(
        "self_attention.linear_proj.weight",
        "self_attn.o_proj.weight",
        "hidden_size",
        "attention_size",
        split=TPSplit.COLUMNS,
    ),
    copy(
        "self_attention.linear_proj.bias",
        "self_attn.o_proj.bias",
        "hidden_size",
        when="linear_bias",
    ),
)

MLP = (
    stack(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "ffn_hidden_size",
        "hidden_size",
    ),
    stack(
        "mlp.linear_fc1.bias",
        ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "ffn_hidden_size",
        when="linear_bias",
    ),
    copy(
        "mlp.linear_fc2.weight",
        "mlp.down_proj.weight",
        "hidden_size",
        "ffn_hidden_size",
        split=TPSplit.COLUMNS,
    ),
    copy("mlp.linear_fc2.bias", "mlp.down_proj.bias", "hidden_size", when="linear_bias"),
)

TABLE = WeightTable(model=MODEL, layer=NORMS + ATTENTION, dense=MLP)


def read_config(config: HfConfig, tensors: Collection[str]) -> ModelConfig:
    """Read the model configuration from a config.json and, where given, the tensor names."""
    fields = common_fields(config, tensors)
    if config.get("model_type") == "mistral":  # Llama in transformers has no window
        fields["sliding_window"] = window(config)
    return ModelConfig(family="llama", **fields)


def common_fields(
    config: HfConfig, tensors: Collection[str], has_qkv_bias: bool = False
) -> dict[str, Any]:
    """Return the fields that Llama shares with other families."""
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{config.source}: hidden_act is {activation!r}: only silu is supported")
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", most=MANY)
    groups = config.integer("num_key_value_heads", default=heads, most=MANY)
    if heads % groups:
        raise ConfigError(f"{config.source}: {groups} key/value heads do not divide {heads} heads")
    biases = _biases(config, tensors, has_qkv_bias)
    return {
        "num_layers": config.integer("num_hidden_layers", most=MANY),
        "hidden_size": hidden,
        "ffn_hidden_size": config.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": config.integer("head_dim", default=hidden // heads),
        "vocab_size": config.integer("vocab_size"),
        "max_position_embeddings": config.integer("max_position_embeddings", default=2048),
        "norm_epsilon": config.positive("rms_norm_eps", 1e-6),
        "tied": _is_tied(config, tensors),
        "rotary": config.rotary(),
        **biases,
    }


def window(config: HfConfig) -> int | None:
    """Return the sliding window of all layers, where it is shorter than the longest sequence."""
    if config.get("sliding_window") is None:
        return None
    size = config.integer("sliding_window")
    return size if size < config.integer("max_position_embeddings") else None


def window_by_layer(config: HfConfig) -> int | None:
    """Return the sliding window of a model that says for each layer whether it has one."""
    size, is_on = window(config), config.flag("use_sliding_window", False)
    first = config.integer("max_window_layers", least=0)
    numbers = range(config.integer("num_hidden_layers", most=MANY))
    full, sliding = "full_attention", "sliding_attention"
    kinds = {str(kind) for kind in config.values("layer_types")}
    kinds = kinds or {sliding if number >= first else full for number in numbers}
    if unknown := kinds - {full, sliding}:
        raise ConfigError(f"{config.source}: layer_types has {min(unknown)}: use {full}")
    if not (is_on and size and sliding in kinds):
        return None
    if full in kinds:
        raise ConfigError(f"{config.source}: layers with and without a sliding window are mixed")
    return size


def _is_tied(config: HfConfig, tensors: Collection[str]) -> bool:
    """Read the config or, where it is silent, see whether there is an output layer."""
    has_no_head = bool(tensors) and "lm_head.weight" not in tensors
    return config.flag("tie_word_embeddings", has_no_head)


def _biases(config: HfConfig, tensors: Collection[str], has_qkv_bias: bool) -> dict[str, bool]:
    """Find the biases among the tensors or, where these are unknown, in the config."""
    output, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    qkv = has_qkv_bias or output
    if tensors:
        endings = {".".join(name.split(".")[-2:]) for name in tensors}
        qkv, output = "q_proj.bias" in endings, "o_proj.bias" in endings
        mlp = "down_proj.bias" in endings
    if output != mlp:
        there, missing = ("o_proj", "MLP") if output else ("MLP", "o_proj")
        raise ConfigError(
            f"{config.source}: there is a bias in the {there} but none in the {missing}: "
            "Megatron has a bias in both or in neither"
        )
    return {"qkv_bias": qkv, "linear_bias": output}


FAMILY = Family(
    name="llama",
    model_types={
        "llama": {},
        "mistral": {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    },
    aliases=("llama2", "llama3", "smollm2", "mistral"),
    read_config=read_config,
    table=TABLE,
)
