"""Stand-in for megatron.training where only megatron-core is installed."""

from mindspeed.compat.megatron_training.training import get_model
from mindspeed.compat.run_arguments import get_args

__all__ = ["get_args", "get_model"]
