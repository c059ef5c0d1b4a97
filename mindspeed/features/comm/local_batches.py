"""Batches of Megatron's scripts without broadcasts in tensor-parallel groups of one rank."""

import sys
from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class LocalBatches(Feature):
    """Hand batches on without broadcasts where a tensor-parallel group has one rank."""

    name = "local_batches"
    title = "Batches without broadcasts"
    group = "Comm"
    level = Level.AFFINITY
    enabled_by = "skip_batch_broadcasts"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        skip_batch_broadcasts: bool | None = None
        """Send no batch of Megatron's scripts where its tensor-parallel group has one rank.
        Default: on CUDA."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the function through which the scripts get their batches."""
        # Only Megatron-LM's own training package has it, and its parser ran by now.
        if "megatron.training.arguments" in sys.modules:
            yield Patch.wrap(
                "megatron.training.utils:get_batch_on_this_tp_rank",
                "mindspeed.compat.local_batches:wrap_get_batch",
                why="the host waits for the device in every micro-batch",
            )
