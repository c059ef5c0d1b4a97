"""Mixtral's weight names: w1 is the gate, w3 the up and w2 the down projection."""

from dataclasses import replace

from mindspeed_llm.models.llama.weights import TABLE as LLAMA
from mindspeed_llm.models.rules import Cut, copy, stack

_EXPERT = "block_sparse_moe.experts.{expert}."

TABLE = replace(
    LLAMA,
    moe=(
        copy("mlp.router.weight", "block_sparse_moe.gate.weight", "moe.num_experts", "hidden_size"),
    ),
    expert=(
        stack(
            "mlp.experts.{expert}.linear_fc1.weight",
            (_EXPERT + "w1.weight", _EXPERT + "w3.weight"),
            "moe.ffn_hidden_size",
            "hidden_size",
        ),
        copy(
            "mlp.experts.{expert}.linear_fc2.weight",
            _EXPERT + "w2.weight",
            "hidden_size",
            "moe.ffn_hidden_size",
            cut=Cut.COLUMNS,
        ),
    ),
)
