"""DeepSeek-V2's weight names."""

from mindspeed_llm.models.llama.weights import ATTENTION, MLP, MODEL, NORMS
from mindspeed_llm.models.qwen3_moe.weights import EXPERT, ROUTER
from mindspeed_llm.models.rules import Cut, copy, stack
from mindspeed_llm.models.table import WeightTable

_OUTPUT = tuple(rule for rule in ATTENTION if "linear_proj" in rule.mcore)

LATENT_ATTENTION = (
    copy(
        "self_attention.linear_q_proj.weight",
        "self_attn.q_proj.weight",
        "query_size",
        "hidden_size",
        cut=Cut.ROWS,
        when="q_is_direct",
    ),
    copy(
        "self_attention.linear_q_down_proj.weight",
        "self_attn.q_a_proj.weight",
        "mla.q_lora_rank",
        "hidden_size",
        cut=Cut.ROWS,
        when="q_is_compressed",
    ),
    copy(
        "self_attention.q_layernorm.weight",
        "self_attn.q_a_layernorm.weight",
        "mla.q_lora_rank",
        when="q_is_compressed",
    ),
    copy(
        "self_attention.linear_q_up_proj.weight",
        "self_attn.q_b_proj.weight",
        "query_size",
        "mla.q_lora_rank",
        cut=Cut.ROWS,
        when="q_is_compressed",
    ),
    copy(
        "self_attention.linear_kv_down_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "mla.kv_down_size",
        "hidden_size",
        cut=Cut.ROWS,
    ),
    copy(
        "self_attention.kv_layernorm.weight",
        "self_attn.kv_a_layernorm.weight",
        "mla.kv_lora_rank",
    ),
    copy(
        "self_attention.linear_kv_up_proj.weight",
        "self_attn.kv_b_proj.weight",
        "kv_up_size",
        "mla.kv_lora_rank",
        cut=Cut.ROWS,
    ),
    *_OUTPUT,
)

SHARED_EXPERTS = (
    stack(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        "moe.shared_ffn_hidden_size",
        "hidden_size",
        when="moe.shared_ffn_hidden_size",
    ),
    copy(
        "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_experts.down_proj.weight",
        "hidden_size",
        "moe.shared_ffn_hidden_size",
        cut=Cut.COLUMNS,
        when="moe.shared_ffn_hidden_size",
    ),
)

TABLE = WeightTable(
    model=MODEL,
    layer=NORMS + LATENT_ATTENTION,
    dense=MLP,
    moe=ROUTER + SHARED_EXPERTS,
    expert=EXPERT,
)
