"""The weight names of Qwen3-MoE; DeepSeek names its experts alike."""

from dataclasses import replace

from mindspeed_llm.models.qwen3.weights import TABLE as QWEN3
from mindspeed_llm.models.rules import Cut, copy, stack

ROUTER = (copy("mlp.router.weight", "mlp.gate.weight", "moe.num_experts", "hidden_size"),)

EXPERT = (
    stack(
        "mlp.experts.{expert}.linear_fc1.weight",
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        "moe.ffn_hidden_size",
        "hidden_size",
    ),
    copy(
        "mlp.experts.{expert}.linear_fc2.weight",
        "mlp.experts.{expert}.down_proj.weight",
        "hidden_size",
        "moe.ffn_hidden_size",
        cut=Cut.COLUMNS,
    ),
)

TABLE = replace(QWEN3, moe=ROUTER, expert=EXPERT)
