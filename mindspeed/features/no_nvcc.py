"""Megatron-LM's scripts ask nvcc for its version and then compile nothing."""

from collections.abc import Iterator
from typing import Any

from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class NoNvcc(Feature):
    """A script starts without the CUDA toolkit, which its legacy kernels no longer need."""

    name = "no_nvcc"
    title = "Start without nvcc"
    group = "Foundation"
    level = Level.COMPAT

    def patches(self, options: Any) -> Iterator[Patch]:
        """Leave the question out."""
        yield Patch.replace(
            "megatron.legacy.fused_kernels:load",
            "mindspeed.compat.legacy_kernels:load",
            why="its only effect is to fail where there is no nvcc: the list of kernels is empty",
        )
