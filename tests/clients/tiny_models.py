"""Tiny models of transformers in float32, with weights that show when two are mixed up."""

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 128
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 500000.0,
    "initializer_range": 0.1,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
    "head_dim": 16,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    # In the published config.json; transformers itself knows no other way.
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS),
    "deepseek_v3": ("DeepseekV3", _LATENT),
}
DENSE = ("llama", "qwen2", "qwen2-tied", "qwen3")
SPARSE = ("qwen3_moe", "deepseek_v3")


def save(name: str, folder: Path) -> str:
    """Write a model with random weights; return its folder."""
    import transformers

    family, more = _MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**_SHAPE | more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Norms of one and biases of zero would hide that one stands in another's place.
        for parameter in [each for each in model.parameters() if each.dim() == 1]:
            parameter += torch.randn(parameter.shape, generator=generator) * 0.1
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer += torch.randn(buffer.shape, generator=generator) * 0.1
    target = folder / name
    model.save_pretrained(target)
    return str(target)
