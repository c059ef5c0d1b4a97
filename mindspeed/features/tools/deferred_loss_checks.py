"""One look a step for losses that are not numbers."""

from collections.abc import Iterator
from typing import Any

from mindspeed import config
from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch


class DeferredLossChecks(Feature):
    """Check the losses of all micro-batches for NaN and infinity once, before the update."""

    name = "deferred_loss_checks"
    title = "Deferred loss checks"
    group = "Tools"
    level = Level.AFFINITY
    enabled_by = "defer_loss_checks"
    default_devices = ("cuda",)

    class Options(config.Options):
        """The switch."""

        defer_loss_checks: bool | None = None
        """Look for NaN and infinity in losses once a step instead of after every micro-batch.
        Default: on CUDA."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Collect what Megatron's scripts validate, and look at it when the passes are done."""
        machine = "megatron.core.rerun_state_machine:RerunStateMachine"
        yield Patch.wrap(
            f"{machine}.validate_result",
            "mindspeed.compat.loss_checks:wrap_validate_result",
            why="the host waits for the device in every micro-batch",
        )
        yield Patch.wrap(
            f"{machine}.should_run_forward_backward",
            "mindspeed.compat.loss_checks:wrap_should_run_forward_backward",
            why="it is asked after the passes of a step and before its update",
        )
