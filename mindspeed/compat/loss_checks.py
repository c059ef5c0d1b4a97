"""NaN and infinity in the losses of a step: looked for once, before its update.

Megatron asks after every micro-batch, and the host waits for the device each time: it then has
nothing queued while it prepares the backward pass.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

DEFERRED = (torch.isnan, torch.isinf)
_PENDING = "pending_checks"


def wrap_validate_result(original: Callable[..., None]) -> Callable[..., None]:
    """Keep a loss of the training for later instead of looking at it."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def validate_result(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        result, reject = (call.arguments[name] for name in ("result", "rejection_func"))
        if reject not in DEFERRED or not torch.is_tensor(result) or not _is_first_run(self):
            _validate(original, call)
            return
        # Megatron scales the loss in place afterwards.
        call.arguments["result"] = kept = result.detach().clone()
        check = functools.partial(_validate, original, call)
        vars(self).setdefault(_PENDING, []).append((reject(kept), check))

    return validate_result


def _validate(original: Callable[..., None], call: inspect.BoundArguments) -> None:
    # Older releases know a check again, when its step is repeated, by the line that calls it.
    original(*call.args, **call.kwargs)


def wrap_should_run_forward_backward(original: Callable[..., bool]) -> Callable[..., bool]:
    """Look at the losses of the step; where one is rejected, all go Megatron's own way."""

    @functools.wraps(original)
    def should_run_forward_backward(self: Any, *args: Any, **kwargs: Any) -> bool:
        pending = vars(self).pop(_PENDING, [])
        if pending and bool(torch.stack([rejected for rejected, _ in pending]).any()):
            for _, check in pending:
                check()
        return original(self, *args, **kwargs)

    return should_run_forward_backward


def _is_first_run(machine: Any) -> bool:
    """Say whether this is the training of a step, not its repetition nor an evaluation."""
    from megatron.core.rerun_state_machine import RerunMode, RerunState

    if not torch.is_grad_enabled() or machine.mode == RerunMode.REPORT_DETERMINISM_STATS:
        return False
    return machine.mode == RerunMode.DISABLED or machine.state == RerunState.INITIAL_RUN
