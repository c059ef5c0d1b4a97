"""Tiny random models of every family, built and saved by transformers' own classes."""

from pathlib import Path

import torch

VOCABULARY = 99  # odd: tensor parallelism has to pad it
TOKENS = torch.tensor([[3, 98, 7, 41, 0, 66, 12, 5, 90, 17], [1, 2, 50, 49, 33, 8, 8, 71, 64, 20]])

_DENSE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LATENT = _DENSE | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", _DENSE),
    "llama_tied": ("LlamaConfig", _DENSE | {"tie_word_embeddings": True}),
    "llama_all_biases": ("LlamaConfig", _DENSE | {"attention_bias": True, "mlp_bias": True}),
    "llama3": (
        "LlamaConfig",
        _DENSE | {"rope_parameters": _LLAMA3, "max_position_embeddings": 65536},
    ),
    "mistral": ("MistralConfig", _DENSE | {"sliding_window": None}),
    "mistral_window": ("MistralConfig", _DENSE | {"sliding_window": 4}),
    "qwen2": ("Qwen2Config", _DENSE),
    "qwen3": ("Qwen3Config", _DENSE | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _DENSE
        | {
            "head_dim": 16,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3_moe_unnormalized": (
        "Qwen3MoeConfig",
        _DENSE
        | {
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
    ),
    "mixtral": ("MixtralConfig", _DENSE | {"num_local_experts": 4, "sliding_window": None}),
    "gpt_oss": (
        "GptOssConfig",
        _DENSE
        | {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "deepseek2": (
        "DeepseekV2Config",
        _LATENT
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
            "topk_method": "greedy",
            "rope_parameters": _YARN,
        },
    ),
    "deepseek2_lite": (
        "DeepseekV2Config",
        _LATENT
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek3": (
        "DeepseekV3Config",
        _LATENT
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}


def build(name):
    """Return a model with weights that make every part of it count."""
    import transformers

    config_class, values = MODELS[name]
    config = getattr(transformers, config_class)(**values)
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            spread = 0.2 if tensor.ndim > 1 else 0.1
            tensor.copy_(torch.randn_like(tensor) * spread + (1 if "norm" in key else 0))
    model.tie_weights()
    return model.eval()


def save(name, folder: Path, dtype=torch.float32) -> Path:
    """Save a model under folder/name and return that."""
    model = build(name).to(dtype)
    for key, tensor in model.named_buffers():
        if "correction_bias" in key:
            tensor.data = tensor.data.float()  # as in every DeepSeek-V3
    model.save_pretrained(folder / name)
    return folder / name


def logits(model_folder: Path) -> torch.Tensor:
    """Return what transformers says about TOKENS."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(TOKENS).logits
