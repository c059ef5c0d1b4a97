"""DeepSeek-V3's weight names."""

from dataclasses import replace

from mindspeed_llm.models.deepseek2.weights import TABLE as DEEPSEEK2
from mindspeed_llm.models.rules import Cut, copy

_CHOOSING_BIAS = copy(
    "mlp.router.expert_bias",
    "mlp.gate.e_score_correction_bias",
    "moe.num_experts",
    is_float32=True,
)

TABLE = replace(
    DEEPSEEK2,
    moe=(*DEEPSEEK2.moe, _CHOOSING_BIAS),
    mtp=(
        copy("enorm.weight", "enorm.weight", "hidden_size"),
        copy("hnorm.weight", "hnorm.weight", "hidden_size"),
        copy("eh_proj.weight", "eh_proj.weight", "hidden_size", "two_hidden", cut=Cut.ROWS),
        copy("final_layernorm.weight", "shared_head.norm.weight", "hidden_size"),
    ),
    mtp_copies=(
        ("embed_tokens.weight", "embedding.word_embeddings.weight"),
        ("shared_head.head.weight", "output_layer.weight"),
    ),
)
