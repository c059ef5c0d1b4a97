"""Serve stand-ins to scripts that import a suite and not the adaptor.

Imported by every command, so it needs no package that may be missing.
"""

from mindspeed.patching import Aliases


def serve_training() -> None:
    """Serve `megatron.training`; where that package is installed it is left alone."""
    Aliases().serve("megatron.training", "mindspeed.compat.stand_ins.megatron_training")
