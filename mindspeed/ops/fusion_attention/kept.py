"""Results of attention that a recomputed layer takes from its first run.

    checkpoint(KeptResults().wrap_function(layer), x)
    out, lse = compute_once(lambda: forward(q, k, v))     # in the attention of the layer

Backward of attention needs its output and log-sum-exp, not the steps to them. A function that is
run twice, in forward without a graph and again in backward, keeps both the first time and finds
them the second time, in the same order.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

Result = tuple[Tensor, Tensor]


class KeptResults:
    """The outputs and log-sum-exps of one function's calls of attention."""

    def __init__(self) -> None:
        self._results: deque[Result] = deque()
        self._is_replay = False
        self._outer: KeptResults | None = None

    def wrap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that keeps results when it runs, and takes them when it runs again."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._running():
                return function(*args, **kwargs)

        return run

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._is_replay = bool(self._results)
        self._outer = _active.get()
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)
            self._outer = None
        if self._is_replay and self._results:
            raise RuntimeError(
                f"a recomputed layer left {len(self._results)} results of attention unused: it has "
                "to call attention as often as in forward"
            )

    def result(self, compute: Callable[[], Result]) -> Result:
        """Return the result of the next call."""
        if self._is_replay and self._results:
            return self._results.popleft()
        # A layer inside a recomputed one takes from that, and keeps for its own second run.
        result = compute() if self._outer is None else self._outer.result(compute)
        if not self._is_replay:
            self._results.append(result)
        return result


_active: ContextVar[KeptResults | None] = ContextVar("kept_attention", default=None)
"""Of the function that runs now: attention is called from Megatron's modules."""


@contextmanager
def suspended() -> Iterator[None]:
    """Neither keep nor take results: what runs inside is no part of the function."""
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


def is_active() -> bool:
    """Return whether results are kept or taken now."""
    return _active.get() is not None


def compute_once(compute: Callable[[], Result]) -> Result:
    """Return the output and log-sum-exp of a call of attention, computed if they are not kept."""
    active = _active.get()
    return compute() if active is None else active.result(compute)
