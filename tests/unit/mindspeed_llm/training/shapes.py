"""Sizes of a tiny model, dense and with experts, that no weights have to be loaded for."""

from mindspeed_llm.models.config import MLAConfig, ModelConfig, MoEConfig

DENSE = ModelConfig(
    family="llama",
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=99,
    max_position_embeddings=64,
    norm_epsilon=1e-6,
    tied=False,
)
ROUTED = MoEConfig(
    num_experts=4,
    topk=2,
    ffn_hidden_size=16,
    is_moe_layer=(True,) * 4,
    score_function="sigmoid",
    expert_bias=True,
)
EXPERTS = DENSE.model_copy(update={"moe": ROUTED})
LATENT = MLAConfig(
    q_lora_rank=None, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8
)
