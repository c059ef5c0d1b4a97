"""Hooks of the trace in the train loop of Megatron-LM."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from mindspeed.profiling.options import trace_of
from mindspeed.profiling.trace import Trace

_NSYS = "NSYS_PROFILING_SESSION_ID"
"""Set by Nsight Systems in what it runs."""

_running: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""The trace of the train loop that is running."""


def wrap_train(original: Callable[..., Any], options: Any) -> Callable[..., Any]:
    """Trace in place of Megatron's own profiler, unless that one or Nsight Systems is used."""

    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        parsed = get_args()
        if parsed.use_pytorch_profiler or _NSYS in os.environ:
            if -1 in parsed.profile_ranks:
                parsed.profile_ranks = range(parsed.world_size)
            return original(*args, **kwargs)
        trace = trace_of(options, parsed.rank)
        token = _running.set(trace)
        parsed.profile = False
        try:
            return original(*args, **kwargs)
        finally:
            parsed.profile = True
            _running.reset(token)
            if trace is not None:
                trace.end()

    return train


def wrap_train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Trace around a step."""

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        if (trace := _running.get()) is None:
            return original(*args, **kwargs)
        from megatron.training import get_args

        with trace.step(get_args().curr_iteration + 1):
            return original(*args, **kwargs)

    return train_step
