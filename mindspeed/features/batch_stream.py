"""Batches of Megatron's scripts on a stream of their own."""

import sys
from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class BatchStream(Feature):
    """Fetch batches beside the stream of the model, so that the host does not wait for it."""

    name = "batch_stream"
    title = "Batches on their own stream"
    group = "Affinity"
    level = Level.AFFINITY
    enabled_by = "fetch_batches_on_stream"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        fetch_batches_on_stream: bool | None = None
        """Let the batches of Megatron's scripts come on a stream of their own. Default: on
        CUDA."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Wrap the function through which the scripts get their batches."""
        # Only Megatron-LM's own training package has it, and its parser ran by now.
        if "megatron.training.arguments" in sys.modules:
            yield Patch.wrap(
                "megatron.training.utils:get_batch_on_this_tp_rank",
                "mindspeed.compat.batch_stream:wrap_get_batch",
                why="the host waits for the device in every micro-batch",
            )
