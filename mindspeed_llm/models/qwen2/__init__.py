"""Qwen2 and Qwen2.5: Llama's layers with a bias on query, key and value."""

from mindspeed_llm.models.family import Family
from mindspeed_llm.models.llama.weights import TABLE
from mindspeed_llm.models.qwen2.shape import shape

FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    aliases=("qwen25", "qwen2.5"),
    shape=shape,
    table=TABLE,
)
