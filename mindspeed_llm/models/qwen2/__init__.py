"""Qwen2 and Qwen2.5: Llama's layers with a bias on query, key and value."""

from mindspeed_llm.models.family import Family
from mindspeed_llm.models.llama.weights import TABLE
from mindspeed_llm.models.qwen2.shape import shape

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILY = Family(
    name="qwen2",
    model_types={"qwen2": DEFAULTS},
    aliases=("qwen25", "qwen2.5"),
    shape=shape,
    table=TABLE,
)
