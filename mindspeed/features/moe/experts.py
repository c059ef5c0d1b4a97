"""The check that features of experts share: the model has some."""

from mindspeed.config import ConfigError
from mindspeed.features.base import Context


def number_of_experts(context: Context) -> int:
    """Return the experts of a layer, 0 of a dense model."""
    return int(context.argument("num_experts") or context.argument("num_moe_experts", 0))


def check_experts(flag: str, context: Context) -> None:
    """Raise ConfigError for a model that is known to have no experts."""
    if context.megatron is not None and not number_of_experts(context):
        raise ConfigError(
            f"{flag} is for layers of experts, and this model has none: drop it, or train a "
            "mixture of experts"
        )
