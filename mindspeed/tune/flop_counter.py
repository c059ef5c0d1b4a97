"""Count the floating-point operations of a piece of code, recomputed ones told apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from mindspeed.tune.flop_formulas import FORMULAS

_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


@dataclass(frozen=True)
class Flops:
    """Operations of one step: what the model needs, and what the device did."""

    model: float
    hardware: float
    """With the activations that were computed again."""


class FlopCounter(TorchDispatchMode):
    """Counts what runs inside, forward and backward, on this thread and autograd's."""

    def __init__(self) -> None:
        super().__init__()
        self._model = 0.0
        self._again = 0.0

    @property
    def flops(self) -> Flops:
        """What was counted so far."""
        return Flops(self._model, self._model + self._again)

    def add(self, count: float) -> None:
        """Count operations, as recomputed where they are."""
        if _recomputing.get():
            self._again += count
        else:
            self._model += count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count one operator, or those it is made of."""
        kwargs = kwargs or {}
        formula = FORMULAS.get(_name(func))
        if formula is not None:
            self.add(formula(_by_name(func, args, kwargs)))
        elif isinstance(func, torch._ops.OpOverload):
            with self:  # an operator that is only a composition of others
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def wrap_grouped_kernel(original: Callable[..., None]) -> Callable[..., None]:
    """Count a kernel that adds the products of grouped rows; torch does not see its products."""

    @functools.wraps(original)
    def launch(x: torch.Tensor, dy: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        # Modes follow autograd to its own threads; a variable of this one would not.
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, FlopCounter):
                mode.add(2 * x.numel() * dy.shape[-1])
        original(x, dy, *args, **kwargs)

    return launch


def marks_recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function; what it does when backward calls it counts as recomputed."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:  # not inside a backward pass: the first time
            return function(*args, **kwargs)
        with _recomputed():
            return function(*args, **kwargs)

    return marked


@contextmanager
def _recomputed() -> Iterator[None]:
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def _name(func: Any) -> str:
    """Return the operator's name; in place (`addmm_`) or into a result, it is the same one."""
    schema = getattr(func, "_schema", None)
    return "" if schema is None else schema.name.removesuffix("_")


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments as the schema does; those that were not given are left out."""
    return {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
