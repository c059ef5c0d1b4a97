"""Mixtral: Llama's attention with experts in every layer."""

from mindspeed_llm.models.family import Family
from mindspeed_llm.models.mixtral.shape import shape
from mindspeed_llm.models.mixtral.weights import TABLE

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.001,
}

FAMILY = Family(
    name="mixtral", model_types={"mixtral": _DEFAULTS}, aliases=(), shape=shape, table=TABLE
)
