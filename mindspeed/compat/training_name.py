"""Serve `megatron.training` to scripts that import a suite and not the adaptor."""

from mindspeed.patching import Aliases


def serve() -> None:
    """Answer `from megatron.training import get_args` where no such package is installed."""
    Aliases().serve("megatron.training", "mindspeed.compat.megatron_training")
