"""Decorators that decide when a function of set-up code runs."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["AutoExecuteFunction", "Deprecated", "NoExecuteFunction"]

P = ParamSpec("P")
R = TypeVar("R")


def AutoExecuteFunction(function: Callable[[], R]) -> Callable[[], R]:
    """Call the function once, where it is defined; it can be called again."""
    function()
    return function


def NoExecuteFunction(function: Callable[P, R]) -> Callable[P, R]:
    """Leave the function to its callers."""
    return function


def Deprecated(function: Callable[P, R]) -> Callable[P, R]:
    """Warn at every call of the function."""

    @functools.wraps(function)
    def deprecated(*args: P.args, **kwargs: P.kwargs) -> R:
        text = f"{function.__module__}.{function.__qualname__} is deprecated"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return function(*args, **kwargs)

    return deprecated
