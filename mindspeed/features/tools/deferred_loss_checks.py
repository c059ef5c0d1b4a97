"""One check a step for losses that are NaN or infinite, before its update.

Megatron checks after every micro-batch, and the host waits for the device each time: it then has
nothing queued while it prepares the backward pass.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from mindspeed import config
from mindspeed.features.base import Feature, Level
from mindspeed.patching import Patch

_PENDING = "pending_checks"


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
        """Check losses for NaN and infinity once a step instead of after every micro-batch.
        Default: on CUDA."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Collect what Megatron's scripts validate, and check it when the passes are done."""
        machine = "megatron.core.rerun_state_machine:RerunStateMachine"
        yield Patch.wrap(
            f"{machine}.validate_result",
            wrap_validate_result,
            why="the host waits for the device in every micro-batch",
        )
        yield Patch.wrap(
            f"{machine}.should_run_forward_backward",
            wrap_should_run_forward_backward,
            why="it is called after the passes of a step and before its update",
        )


def wrap_validate_result(original: Callable[..., None]) -> Callable[..., None]:
    """Keep a loss of the training for later instead of checking it."""
    import torch

    signature = inspect.signature(original)

    @functools.wraps(original)
    def validate_result(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        result, reject = (call.arguments[name] for name in ("result", "rejection_func"))
        if (
            reject not in (torch.isnan, torch.isinf)
            or not torch.is_tensor(result)
            or not _is_first_run(self)
        ):
            _validate(original, call)
            return
        # Megatron scales the loss in place afterwards.
        call.arguments["result"] = kept = result.detach().clone()
        check = functools.partial(_validate, original, call)
        vars(self).setdefault(_PENDING, []).append((reject(kept), check))

    return validate_result


def _validate(original: Callable[..., None], call: inspect.BoundArguments) -> None:
    # Older releases identify a check, when its step is rerun, by the line that calls it.
    original(*call.args, **call.kwargs)


def wrap_should_run_forward_backward(original: Callable[..., bool]) -> Callable[..., bool]:
    """Check the losses of the step; where one is rejected, all take Megatron's own path."""
    import torch

    @functools.wraps(original)
    def should_run_forward_backward(self: Any, *args: Any, **kwargs: Any) -> bool:
        pending = vars(self).pop(_PENDING, [])
        if pending and bool(torch.stack([rejected for rejected, _ in pending]).any()):
            for _, check in pending:
                check()
        return original(self, *args, **kwargs)

    return should_run_forward_backward


def _is_first_run(machine: Any) -> bool:
    """Return whether this is the first run of a train step, not a rerun or an evaluation."""
    import torch
    from megatron.core.rerun_state_machine import RerunMode, RerunState

    if not torch.is_grad_enabled() or machine.mode == RerunMode.REPORT_DETERMINISM_STATS:
        return False
    is_first = machine.mode == RerunMode.DISABLED or machine.state == RerunState.INITIAL_RUN
    return bool(is_first)
