"""Llama 2 and 3, SmolLM2, Mistral and everything else with Llama's layers."""

from mindspeed_llm.models.family import Family
from mindspeed_llm.models.llama.shape import shape
from mindspeed_llm.models.llama.weights import TABLE

FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral"),
    aliases=("llama2", "llama3", "smollm2", "mistral"),
    shape=shape,
    table=TABLE,
)
