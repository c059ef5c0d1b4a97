"""Compare how two callables are called: parameter names, kinds, and which have defaults."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from inspect import Parameter
from types import FunctionType, WrapperDescriptorType
from typing import Any

# Name, kind, whether it has a default.
_Shape = tuple[str, Any, bool]


def mismatch(original: object, new: object, forwards: bool) -> str | None:
    """Return why `new` cannot take the place of `original`; None if it can.

    `forwards`: a trailing (*args, **kwargs) is trusted to pass everything on to the original.
    """
    if isinstance(original, property):
        return None if isinstance(new, property) else f"a property cannot become {new!r}"
    if not callable(original):
        return None
    if not callable(new):
        return f"the original is callable, {new!r} is not"
    if isinstance(original, type) and not isinstance(new, type):
        return f"a class cannot become {new!r}: subclasses and isinstance checks need a class"
    expected, given = _expected(original), _parameters(new, declared=False)
    if expected is None or expected == given or (forwards and _forwards(given, expected)):
        return None
    return (
        f"the original takes {_text(expected)} but {getattr(new, '__qualname__', new)} takes "
        f"{_text(given)}: use the same names, kinds and defaults"
    )


def _expected(original: object) -> list[_Shape] | None:
    """Return what callers of `original` rely on: under a decorator, what the decorator declares."""
    real = _parameters(original, declared=False)
    return _parameters(original, declared=True) if _forwards(real, []) else real


def _forwards(given: Sequence[_Shape] | None, expected: Sequence[_Shape]) -> bool:
    """Return whether `given` is the head of `expected` followed by (*args, **kwargs)."""
    if given is None or [kind for _, kind, _ in given[-2:]] != [
        Parameter.VAR_POSITIONAL,
        Parameter.VAR_KEYWORD,
    ]:
        return False
    return list(given[:-2]) == list(expected[: len(given) - 2])


def _parameters(callable_: object, declared: bool) -> list[_Shape] | None:
    """Return the shape of each parameter; None if Python cannot read them (compiled code)."""
    entry, bound = _entry(callable_)
    if entry is None or isinstance(entry, WrapperDescriptorType):
        return [] if entry is None else None
    if isinstance(entry, FunctionType) and not declared:
        entry = _bare(entry)
    try:
        signature = inspect.signature(entry, follow_wrapped=declared)
    except (TypeError, ValueError):
        return None
    shapes = [
        (each.name, each.kind, each.default is not Parameter.empty)
        for each in signature.parameters.values()
    ]
    return shapes[1:] if bound and shapes and shapes[0][1] != Parameter.VAR_POSITIONAL else shapes


def _entry(callable_: object) -> tuple[Any, bool]:
    """Return the function that decides how to call, and whether its first parameter is implied."""
    if not isinstance(callable_, type):
        return callable_, False
    forward = inspect.getattr_static(callable_, "forward", None)
    if isinstance(forward, staticmethod) and callable(getattr(callable_, "apply", None)):
        # An autograd function: called as apply(...), which puts ctx in front.
        names = list(inspect.signature(forward.__func__).parameters)
        return forward.__func__, names[:1] == ["ctx"]
    for name in ("__init__", "__new__"):
        entry = getattr(callable_, name)
        if entry is not getattr(object, name):
            return entry, True
    return None, False


def _bare(function: FunctionType) -> FunctionType:
    """Copy the function without `__wrapped__` and `__signature__`, which hide its parameters."""
    bare = FunctionType(
        function.__code__, function.__globals__, "bare", function.__defaults__, function.__closure__
    )
    bare.__kwdefaults__ = function.__kwdefaults__
    return bare


def _text(shapes: Sequence[_Shape] | None) -> str:
    if shapes is None:
        return "parameters that Python cannot read"
    parameters = [
        Parameter(name, kind, default=... if optional else Parameter.empty)
        for name, kind, optional in shapes
    ]
    return str(inspect.Signature(parameters)).replace("Ellipsis", "...")
