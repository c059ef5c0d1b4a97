"""Hooks of the FLOP meter in Megatron: its train step, log line and recompute functions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches

from mindspeed.tune.flop_counter import marks_recompute
from mindspeed.tune.flop_meter import FlopMeter

_ELAPSED = re.compile(r" elapsed time per iteration \(ms\): ([0-9.]+) \|")


@functools.cache
def meter() -> FlopMeter:
    """Return the meter of this process, shared by the train step and the log line."""
    return FlopMeter()


def wrap_train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Count the operations of the first step, and again when the micro-batches change."""

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        with meter().step(get_num_microbatches()):
            return original(*args, **kwargs)

    return train_step


def wrap_print_rank_last(original: Callable[[str], None]) -> Callable[[str], None]:
    """Add the rates to the line of an iteration, right after the time they are computed from."""

    @functools.wraps(original)
    def print_rank_last(message: str) -> None:
        original(_ELAPSED.sub(_with_rates, message))

    return print_rank_last


def _with_rates(elapsed: re.Match[str]) -> str:
    rates = meter().rates(float(elapsed[1]) / 1e3)
    return elapsed[0] + "".join(f" {name}: {rate:.4g} |" for name, rate in rates.items())


def wrap_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the function that Megatron's or torch's checkpoint recomputes."""

    @functools.wraps(original)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(marks_recompute(function), *args, **kwargs)

    return checkpoint


def wrap_te_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the function that transformer_engine's checkpoint recomputes."""

    @functools.wraps(original)
    def te_checkpoint(forward_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(marks_recompute(forward_func), *args, **kwargs)

    return te_checkpoint


def wrap_checkpoint_without_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the function whose output is discarded and recomputed."""

    @functools.wraps(original)
    def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return original(self, marks_recompute(run_function), *args)

    return checkpoint
