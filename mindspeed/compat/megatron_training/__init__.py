"""Stand-in for megatron.training where only megatron-core is installed."""

from mindspeed.compat.megatron_training.training import get_model

__all__ = ["get_model"]
