"""FSDP in Megatron-LM scripts without a GPU."""

from collections.abc import Iterator
from typing import Any

from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class FsdpOnCpu(Feature):
    """Megatron asks tensor parallelism for one CUDA queue and FSDP for several; a cpu has none."""

    name = "fsdp_on_cpu"
    title = "FSDP on cpu"
    group = "Foundation"
    level = Level.COMPAT
    devices = ("cpu",)

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the check: the environment was set before the arguments were known."""
        yield Patch.wrap(
            "megatron.training.arguments:validate_args",
            "mindspeed.compat.fsdp_arguments:wrap_validate_args",
            why="FSDP refuses CUDA_DEVICE_MAX_CONNECTIONS=1, which all else asks for",
        )
