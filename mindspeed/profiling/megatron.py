"""Hooks of the trace in the train loop of Megatron-LM."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from mindspeed.profiling.options import trace_of
from mindspeed.profiling.trace import Trace

_NSYS = "NSYS_PROFILING_SESSION_ID"
"""Set by Nsight Systems in what it runs."""

_running: Trace | None = None


def wrap_train(original: Callable[..., Any], options: Any) -> Callable[..., Any]:
    """Trace in place of Megatron's own profiler, unless that one or Nsight Systems is used."""

    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        global _running
        from megatron.training import get_args

        parsed, given = get_args(), get_args().profile_ranks
        if parsed.use_pytorch_profiler or _NSYS in os.environ:
            parsed.profile_ranks = range(parsed.world_size) if -1 in given else given
            return original(*args, **kwargs)
        parsed.profile, _running = False, trace_of(options, parsed.rank)
        try:
            return original(*args, **kwargs)
        finally:
            if _running is not None:
                _running.end()
            parsed.profile, _running = True, None

    return train


def wrap_train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Trace around a step."""

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        if _running is None:
            return original(*args, **kwargs)
        from megatron.training import get_args

        with _running.step(get_args().curr_iteration + 1):
            return original(*args, **kwargs)

    return train_step
