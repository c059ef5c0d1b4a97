"""Llama 2 and 3, SmolLM2, Mistral and everything else with Llama's layers."""

from mindspeed_llm.models.family import Family
from mindspeed_llm.models.llama.shape import shape
from mindspeed_llm.models.llama.weights import TABLE

FAMILY = Family(
    name="llama",
    model_types={
        "llama": {},
        "mistral": {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    },
    aliases=("llama2", "llama3", "smollm2", "mistral"),
    shape=shape,
    table=TABLE,
)
