"""The Megatron model of a model_config: its TransformerConfig, its layer specs and the GPTModel.

Works with every megatron-core from 0.12.1 on; import the adaptor first.
"""

import dataclasses
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from mindspeed.config import ConfigError
from mindspeed_llm.models.config import ModelConfig, MoEConfig
from mindspeed_llm.models.tensor_gradients import correct_gradients

Impl = Literal["local", "transformer_engine"]
DEFAULTS = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_token_dispatcher_type": "alltoall",  # Megatron's default refuses variable lengths
    "mtp_loss_scaling_factor": 0.1,  # as in Megatron's scripts; 0.12's class has none
}
"""What differs from Megatron's defaults unless an option is given."""


def transformer_config(
    model_config: ModelConfig,
    *,
    noop_layers: Sequence[int] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Any:
    """Return the TransformerConfig of a model; settings (parallel sizes, dtypes) override it.

    Options that the class has under the same name apply where the model leaves them open.
    """
    from megatron.core.transformer import transformer_config as megatron

    fields = _dense_fields(model_config)
    kind = megatron.TransformerConfig
    fields |= _gpt_oss_fields(model_config, {field.name for field in dataclasses.fields(kind)})
    if model_config.mla is not None:
        kind = megatron.MLATransformerConfig
        fields |= _latent_fields(model_config, {field.name for field in dataclasses.fields(kind)})
    if model_config.moe is not None:
        fields |= _moe_fields(model_config.moe)
    fields |= {"mtp_num_layers": model_config.mtp_num_layers or None}
    given = DEFAULTS | same_named(kind, options)
    config = kind(**given | _with_noops(fields, noop_layers) | settings)
    if model_config.mla is None and model_config.rotary.scaling == "yarn":
        for name, value in _yarn(model_config).items():
            setattr(config, name, value)  # GPTModel reads these attributes; they are not fields
    return config


def same_named(kind: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that one of Megatron's config dataclasses has under the same name.

    Megatron decides those that are left open.
    """
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in options.items() if name in names and value is not None}


def gpt_model(
    model_config: ModelConfig,
    config: Any,
    *,
    impl: Impl = "transformer_engine",
    vocab_size: int | None = None,
    max_sequence_length: int | None = None,
    vp_stage: int | None = None,
    seed: int = 0,
    **arguments: Any,
) -> Any:
    """Build the part of the model that this rank (and virtual stage) holds.

    `vocab_size` counts the padding, `seed` is that of a new value head; other arguments
    (pre_process, parallel_output) are GPTModel's.
    """
    from mindspeed_llm.core.models.gpt.gpt_model import GPTModel  # after the adaptor

    spec = layer_spec(config, impl, vp_stage)
    known = inspect.signature(GPTModel).parameters
    if "vp_stage" in known:
        arguments["vp_stage"] = vp_stage
    if model_config.mtp_num_layers:
        arguments["mtp_block_spec"] = _mtp_spec(config, spec, impl, vp_stage)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocab_size or model_config.vocab_size,
        max_sequence_length=max_sequence_length or model_config.max_position_embeddings,
        share_embeddings_and_output_weights=model_config.tied,
        **_rotary_arguments(model_config, known["position_embedding_type"].annotation),
        **arguments,
    )
    correct_gradients(model, model_config)
    if model.post_process and model_config.num_labels:
        from mindspeed_llm.models.value_head import ValueHead

        model.output_layer = ValueHead(config, model_config.num_labels, seed)
    elif model.post_process:
        model.hide_padding(model_config.vocab_size)
    return model


def layer_spec(config: Any, impl: Impl, vp_stage: int | None = None) -> Any:
    """Return the specs of the layers that this rank (and virtual stage) holds."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    stage = _stage(get_gpt_decoder_block_spec, vp_stage)
    if impl == "transformer_engine":
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, **stage)
        if _has_sinks(config):
            _use_local_attention(spec)
        return spec
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, **stage
    )
    if config.multi_latent_attention or config.window_size is not None and not _has_sinks(config):
        _use_te_attention(spec)
    # Megatron chooses the final norm by what is installed, not by what is requested.
    return dataclasses.replace(spec, layer_norm=WrappedTorchNorm)


def _use_te_attention(spec: Any) -> None:
    """Use transformer_engine's: Megatron's own has one head size, and lately only a window."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = TEDotProductAttention


def _has_sinks(config: Any) -> bool:
    return getattr(config, "softmax_type", "vanilla") != "vanilla"


def _use_local_attention(spec: Any) -> None:
    """Use Megatron's own, which alone has a softmax with a trained offset."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = DotProductAttention


def _mtp_spec(config: Any, spec: Any, impl: Impl, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    stage = _stage(get_gpt_mtp_block_spec, vp_stage)
    block = get_gpt_mtp_block_spec(
        config, spec, use_transformer_engine=impl == "transformer_engine", **stage
    )
    if impl == "local" and block is not None:
        _use_torch_norms(block)
    return block


def _use_torch_norms(block: Any) -> None:
    """Use torch's, as in local layers: 0.12 chooses a layer norm, whatever is requested."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for layer in block.layer_specs:
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(layer.submodules, name, WrappedTorchNorm)


def _stage(function: Any, vp_stage: int | None) -> dict[str, Any]:
    """Return the virtual stage for functions that take it; older ones read a global."""
    return {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(function).parameters else {}


def _dense_fields(model_config: ModelConfig) -> dict[str, Any]:
    window = model_config.sliding_window
    return {
        "num_layers": model_config.num_layers,
        "hidden_size": model_config.hidden_size,
        "ffn_hidden_size": model_config.ffn_hidden_size,
        "num_attention_heads": model_config.num_attention_heads,
        "num_query_groups": model_config.num_query_groups,
        "kv_channels": model_config.kv_channels,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model_config.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": model_config.linear_bias,
        "add_qkv_bias": model_config.qkv_bias,
        "qk_layernorm": model_config.qk_layernorm,
        "window_size": (window - 1, 0) if window else None,
    }


def _gpt_oss_fields(model_config: ModelConfig, known: set[str]) -> dict[str, Any]:
    """Return the fields of sinks, alternating windows and clamped activations, where there are."""
    fields: dict[str, Any] = {}
    if model_config.window_layers:
        fields["window_attn_skip_freq"] = [int(has) for has in model_config.window_layers]
    if model_config.attention_sinks:
        fields["softmax_type"] = "learnable"
    if model_config.swiglu_limit is not None:
        fields["activation_func_clamp_value"] = model_config.swiglu_limit
        fields["glu_linear_offset"] = 1.0
    if missing := sorted(fields.keys() - known):
        raise ConfigError(
            f"this megatron-core has no {', '.join(missing)}, which {model_config.family} needs: "
            "update it (0.16 has them)"
        )
    if model_config.swiglu_limit is not None:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        fields["activation_func"] = quick_gelu
    return fields


def _moe_fields(moe: MoEConfig) -> dict[str, Any]:
    _check_weights(moe)
    fields = {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.topk,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_layer_freq": [int(is_moe) for is_moe in moe.is_moe_layer],
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        "moe_router_score_function": moe.score_function,
        "moe_router_pre_softmax": moe.score_function == "softmax" and not moe.normalize_topk,
        "moe_router_topk_scaling_factor": moe.topk_scaling_factor,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_load_balancing_type": "aux_loss" if moe.aux_loss_coeff else "none",
        "moe_aux_loss_coeff": moe.aux_loss_coeff,
        "moe_router_dtype": "fp32",
    }
    if moe.limits_groups:
        fields |= {"moe_router_num_groups": moe.num_groups, "moe_router_group_topk": moe.group_topk}
    return fields


def _check_weights(moe: MoEConfig) -> None:
    """Refuse weights of the chosen experts that Megatron does not compute."""
    if moe.topk == 1 and moe.normalize_topk:
        raise ConfigError(
            "one expert a token with normalized weights, which are all 1, is not supported: "
            "Megatron weighs a single expert by its score; use a model with more experts a token, "
            "or one whose norm_topk_prob is false"
        )
    if moe.topk > 1 and moe.score_function == "sigmoid" and not moe.normalize_topk:
        raise ConfigError("Megatron normalizes the weights of experts chosen by sigmoid scores")


def _latent_fields(model_config: ModelConfig, known: set[str]) -> dict[str, Any]:
    mla, rotary = model_config.mla, model_config.rotary
    assert mla is not None
    norms = "megatron.core.transformer.mla_qk_norm_config"
    if mla.q_lora_rank is None and importlib.util.find_spec(norms) is not None:
        raise ConfigError(
            "this megatron-core puts a norm in front of queries that are not compressed, which "
            "DeepSeek's models do not have: use megatron-core 0.16.1"
        )
    if rotary.scaling == "yarn" and not rotary.truncate:
        raise ConfigError(
            "latent attention in Megatron rounds the range of yarn: truncate is false"
        )
    if rotary.scaling not in ("none", "yarn"):
        raise ConfigError(f"latent attention in Megatron has no rotary scaling {rotary.scaling}")
    # The name of the length changed, and with it which factor tempers the softmax.
    length = "original_max_position_embeddings"
    if length not in known:
        length = "max_position_embeddings"
        if rotary.scaling == "yarn" and rotary.mscale != rotary.mscale_all_dim:
            raise ConfigError(
                f"mscale {rotary.mscale:g} and mscale_all_dim {rotary.mscale_all_dim:g} differ: "
                "that needs megatron-core 0.13 or newer"
            )
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_head_dim,
        "qk_pos_emb_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "yarn" if rotary.scaling == "yarn" else "rope",
        "rotary_base": rotary.base,
        "rotary_scaling_factor": rotary.factor if rotary.scaling == "yarn" else 1.0,
        length: rotary.original_length,
        "beta_fast": rotary.beta_fast,
        "beta_slow": rotary.beta_slow,
        "mscale": rotary.mscale,
        "mscale_all_dim": rotary.mscale_all_dim,
    }


def _rotary_arguments(model_config: ModelConfig, kinds: Any) -> dict[str, Any]:
    rotary = model_config.rotary
    arguments = {"position_embedding_type": "rope", "rotary_base": rotary.base}
    if model_config.mla is not None or rotary.scaling == "none":
        return arguments
    if rotary.scaling == "linear":
        return arguments | {"seq_len_interpolation_factor": rotary.factor}
    if rotary.scaling == "yarn":
        if "yarn" not in get_args(kinds):
            raise ConfigError(
                "this megatron-core has no yarn rotary scaling outside MLA: update it"
            )
        return arguments | {"position_embedding_type": "yarn"}
    fixed = (rotary.low_frequency_factor, rotary.high_frequency_factor, rotary.original_length)
    if fixed != (1.0, 4.0, 8192):
        raise ConfigError(
            "llama3 rotary scaling in Megatron has low_freq_factor 1, high_freq_factor 4 and "
            f"original_max_position_embeddings 8192; the model has {fixed}"
        )
    return arguments | {"rope_scaling": True, "rope_scaling_factor": rotary.factor}


def _yarn(model_config: ModelConfig) -> dict[str, Any]:
    rotary = model_config.rotary
    return {
        "yarn_rotary_scaling_factor": rotary.factor,
        "yarn_original_max_position_embeddings": rotary.original_length,
        "yarn_beta_fast": rotary.beta_fast,
        "yarn_beta_slow": rotary.beta_slow,
        "yarn_mscale": rotary.mscale,
        "yarn_mscale_all_dim": rotary.mscale_all_dim,
        "yarn_correction_range_round_to_int": rotary.truncate,
    }


def _with_noops(fields: dict[str, Any], noops: Sequence[int]) -> dict[str, Any]:
    """Lengthen the model by layers that do nothing, at these numbers of the longer model.

    Each is of the kind of the layer before it: multi-token prediction is of that of the last.
    """
    if not noops:
        return fields
    total = fields["num_layers"] + len(noops)
    longer = {"num_layers": total}
    for name in ("moe_layer_freq", "window_attn_skip_freq"):
        if name in fields:
            before = [sum(noop <= layer for noop in noops) for layer in range(total)]
            longer[name] = [fields[name][max(n - b, 0)] for n, b in enumerate(before)]
    return fields | longer
