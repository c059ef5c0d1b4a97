"""Qwen3 with experts."""

from mindspeed_llm.models.family import Family
from mindspeed_llm.models.qwen3_moe.shape import shape
from mindspeed_llm.models.qwen3_moe.weights import TABLE

_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "router_aux_loss_coef": 0.001,
}

FAMILY = Family(
    name="qwen3_moe",
    model_types={"qwen3_moe": _DEFAULTS},
    aliases=(),
    shape=shape,
    table=TABLE,
)
