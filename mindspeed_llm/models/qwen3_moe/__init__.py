"""Qwen3 with experts."""

from mindspeed_llm.models.family import Family
from mindspeed_llm.models.qwen3_moe.shape import shape
from mindspeed_llm.models.qwen3_moe.weights import TABLE

FAMILY = Family(name="qwen3_moe", model_types=("qwen3_moe",), aliases=(), shape=shape, table=TABLE)
