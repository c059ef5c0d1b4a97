"""Qwen3: Llama's layers with normalized query and key heads."""

from mindspeed_llm.models.family import Family
from mindspeed_llm.models.qwen2 import DEFAULTS as QWEN2
from mindspeed_llm.models.qwen3.shape import shape
from mindspeed_llm.models.qwen3.weights import TABLE

FAMILY = Family(
    name="qwen3",
    model_types={"qwen3": {**QWEN2, "head_dim": 128}},
    aliases=(),
    shape=shape,
    table=TABLE,
)
