"""Flags by which existing scripts describe a model; its config.json decides, they are compared."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field

from mindspeed.config import Alias, ConfigError, Options, Spelling
from mindspeed_llm.models.config import ModelConfig, contradictions, refuse_contradictions


class ArchitectureOptions(Options):
    """Latent attention, experts and scaled positions, as existing scripts describe them; all is
    read from config.json, and only checked where given here."""

    multi_latent_attention: Annotated[bool, Alias("multi_head_latent_attention")] = False
    """Attention is latent: keys and values are compressed."""
    q_lora_rank: int | None = None
    """Rank of the compressed query."""
    kv_lora_rank: int | None = None
    """Rank of the compressed key and value."""
    qk_head_dim: Annotated[int | None, Alias("qk_nope_head_dim")] = None
    """Part of a query and key head without positions."""
    qk_pos_emb_head_dim: Annotated[int | None, Alias("qk_rope_head_dim")] = None
    """Part of a query and key head with rotary positions."""
    v_head_dim: int | None = None
    """Size of a value head."""
    moe_layer_freq: str | None = None
    """Which layers have experts: every so many, or a pattern such as ([0]*3+[1]*58)."""
    first_k_dense_replace: int | None = None
    """Dense layers in front of the first with experts."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of all shared experts together."""
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = None
    """How router logits become scores."""
    moe_router_enable_expert_bias: bool = False
    """A bias chooses, but does not weigh, the experts."""
    norm_topk_prob: bool = False
    """The weights of the chosen experts sum to 1."""
    moe_router_num_groups: int | None = None
    """Groups of experts."""
    moe_router_group_topk: Annotated[int | None, Alias("topk_group")] = None
    """Groups considered for a token."""
    moe_router_topk_scaling_factor: Annotated[float | None, Alias("routed_scaling_factor")] = None
    """Factor on the weights of the chosen experts."""
    mtp_num_layers: int | None = None
    """Layers for multi-token prediction."""
    rotary_percent: Annotated[float, Field(ge=1, le=1)] | None = None
    """Share of a head that is rotated: 1 in every family here."""
    rope_scaling_type: Literal["linear", "llama3", "yarn"] | None = None
    """How positions beyond the trained length are reached."""
    rope_scaling_factor: float | None = None
    """How many times longer than the trained length."""
    rope_scaling_original_max_position_embeddings: Annotated[
        int | None, Alias("original_max_position_embeddings")
    ] = None
    """Trained length (llama3, yarn)."""
    low_freq_factor: float | None = None
    """Wavelengths above the trained length over this are scaled (llama3)."""
    high_freq_factor: float | None = None
    """Wavelengths below the trained length over this stay (llama3)."""
    rope_scaling_beta_fast: float | None = None
    """Rotations above which a dimension is not scaled (yarn)."""
    rope_scaling_beta_slow: float | None = None
    """Rotations below which a dimension is fully scaled (yarn)."""
    rope_scaling_mscale: float | None = None
    """Weight of the attention temperature (yarn)."""
    rope_scaling_mscale_all_dim: float | None = None
    """Weight of the temperature that is on the softmax (yarn)."""


SAME = {
    **{name: name for name in ("hidden_size", "ffn_hidden_size", "num_attention_heads")},
    **{name: name for name in ("num_query_groups", "kv_channels", "vocab_size", "norm_epsilon")},
    "mtp_num_layers": "mtp_num_layers",
    "rotary_base": "rotary.base",
    "rope_scaling_type": "rotary.scaling",
    "rope_scaling_factor": "rotary.factor",
    "rope_scaling_original_max_position_embeddings": "rotary.original_length",
    "low_freq_factor": "rotary.low_frequency_factor",
    "high_freq_factor": "rotary.high_frequency_factor",
    "rope_scaling_beta_fast": "rotary.beta_fast",
    "rope_scaling_beta_slow": "rotary.beta_slow",
    "rope_scaling_mscale": "rotary.mscale",
    "rope_scaling_mscale_all_dim": "rotary.mscale_all_dim",
    "num_experts": "moe.num_experts",
    "moe_router_topk": "moe.topk",
    "moe_ffn_hidden_size": "moe.ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "moe.shared_ffn_hidden_size",
    "moe_router_score_function": "moe.score_function",
    "moe_router_num_groups": "moe.num_groups",
    "moe_router_group_topk": "moe.group_topk",
    "moe_router_topk_scaling_factor": "moe.topk_scaling_factor",
    **{name: f"mla.{name}" for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim")},
    **{name: f"mla.{name}" for name in ("qk_head_dim", "qk_pos_emb_head_dim")},
}
"""Options whose value must be that of a field of the model, where they are given."""
UNSET = {"moe.num_groups": 1, "moe.group_topk": 1, "moe.topk_scaling_factor": 1.0}
"""What a field means that has no value; elsewhere 0."""


def given_architecture(options: ArchitectureOptions) -> list[str]:
    """Return the options of the section that are given and describe a model."""
    names = [name for name in ArchitectureOptions.model_fields if name != "rotary_percent"]
    return [name for name in names if getattr(options, name) not in (None, False)]


def check_architecture(options: Any, model: ModelConfig) -> None:
    """Raise ConfigError, naming each, for options of a command that are not those of the model."""
    found = (_difference(options, model, name, path) for name, path in SAME.items())
    wrong = [text for text in found if text is not None]
    layers = model.num_layers + len(options.noop_layers)
    if options.num_layers not in (None, layers):
        wrong.append(_named(options, "num_layers", layers))
    wrong += _expert_layers(options, model)
    refuse_contradictions(wrong + contradictions(options, model))


def _difference(options: Any, model: ModelConfig, name: str, path: str) -> str | None:
    given, real = getattr(options, name), model.get(path)
    real = UNSET.get(path, 0) if real is None else real
    # A GGUF file keeps 1e-05 in 32 bits, and a config made of one has 9.9999997e-06.
    is_number = not isinstance(given, str) and not isinstance(real, str)
    if given is None or given == real or is_number and math.isclose(given, real, rel_tol=1e-6):
        return None
    return _named(options, name, real)


def _named(options: Options, name: str, real: Any) -> str:
    shown = Spelling.FLAG.with_value(options.name_given(name), getattr(options, name))
    return f"{shown} (the model has {real})"


def _expert_layers(options: Any, model: ModelConfig) -> list[str]:
    """Return what is wrong with the options that say which layers have experts."""
    pattern, dense = options.moe_layer_freq, options.first_k_dense_replace
    if pattern is None and dense is None:
        return []
    count = model.num_layers + len(options.noop_layers)
    given = [layer >= (dense or 0) for layer in range(count)]
    if pattern is not None:
        given = [a and b for a, b in zip(given, parse_pattern(pattern, count))]
    # No-op layers count in a script's pattern and are none of the model's.
    real = [model.is_moe_layer(layer) for layer in range(model.num_layers)]
    if [one for layer, one in enumerate(given) if layer not in options.noop_layers] == real:
        return []
    names = ("moe_layer_freq", "first_k_dense_replace")
    flags = [Spelling.FLAG.with_value(name, getattr(options, name)) for name in names]
    shown = [flag for flag, value in zip(flags, (pattern, dense)) if value is not None]
    first = real.index(True) if any(real) else None
    has = "none" if first is None else f"{sum(real)}, of which layer {first} is the first"
    return [f"{' '.join(shown)} (layers with experts in the model: {has})"]


def parse_pattern(text: str, count: int) -> list[bool]:
    """Return which of so many layers have experts by --moe-layer-freq."""
    words = text.replace(" ", "").removeprefix("(").removesuffix(")")
    if words.isdecimal() and int(words):
        return [layer % int(words) == 0 for layer in range(count)]
    found: list[bool] = []
    for part in words.split("+"):
        match = re.fullmatch(r"\(?\[([01](?:,[01])*)\]\)?(?:\*(\d{1,4}))?", part)
        if match is None:
            raise ConfigError(
                f"--moe-layer-freq {text}: give a number, or a pattern such as ([0]*3+[1]*58)"
            )
        found += [one == "1" for one in match[1].split(",")] * int(match[2] or 1)
    if len(found) != count:
        raise ConfigError(
            f"--moe-layer-freq {text}: is for {len(found)} layers, and the model has {count}"
        )
    return found
