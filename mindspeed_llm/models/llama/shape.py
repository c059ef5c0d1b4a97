"""The shape of a Llama-like model."""

from collections.abc import Collection
from typing import Any

from mindspeed.config import ConfigError
from mindspeed_llm.models.hf_config import MANY, HfConfig
from mindspeed_llm.models.shape import ModelShape


def shape(config: HfConfig, tensors: Collection[str]) -> ModelShape:
    """Read the shape from a config.json and, where the tensors are known, from their names."""
    fields = common_fields(config, tensors)
    if config.get("model_type") == "mistral":  # Llama in transformers has no window
        fields["sliding_window"] = window(config)
    return ModelShape(family="llama", **fields)


def common_fields(
    config: HfConfig, tensors: Collection[str], has_qkv_bias: bool = False
) -> dict[str, Any]:
    """Return the fields that Llama shares with other families."""
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{config.source}: hidden_act is {activation!r}: only silu is served")
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
