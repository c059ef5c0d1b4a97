"""Mixtral: Llama's attention with experts in every layer."""

from mindspeed_llm.models.family import Family
from mindspeed_llm.models.mixtral.shape import shape
from mindspeed_llm.models.mixtral.weights import TABLE

FAMILY = Family(name="mixtral", model_types=("mixtral",), aliases=(), shape=shape, table=TABLE)
