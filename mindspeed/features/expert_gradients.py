"""Gradients of experts whose tensor parallelism is not that of the other layers."""

from collections.abc import Iterator
from typing import Any

from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class ExpertGradients(Feature):
    """Megatron tells experts apart by expert parallelism only, so copies of them drift."""

    name = "expert_gradients"
    title = "Gradients of replicated experts"
    group = "Foundation"
    level = Level.COMPAT

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the constructor that all kinds of data parallelism begin with."""
        yield Patch.wrap(
            "megatron.core.distributed.data_parallel_base:_BaseDataParallel.__init__",
            "mindspeed.compat.expert_gradients:wrap_data_parallel",
            why="experts with a tensor parallelism of their own are reduced in the wrong group",
        )
