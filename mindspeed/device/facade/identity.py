"""What torch knows its own functions by: their names, the script compiler's table, its caches."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import overrides
from torch.jit import _builtins
from torch.jit import annotations as script_annotations
from torch.utils import _device as default_device

if TYPE_CHECKING:
    from mindspeed.device.cpu import Cpu


def redirections(cpu: Cpu) -> Iterator[tuple[object, str, object]]:
    """Yield what finds functions and classes of torch by identity, after all other stand-ins."""
    yield script_annotations, "try_ann_to_type", _knowing_both(script_annotations.try_ann_to_type)
    listed = inspect.unwrap(default_device._device_constructors, stop=_is_cache)
    yield default_device, "_device_constructors", functools.wraps(listed)(_constructors(listed))


def name_by_owner(stand_in: object, owner: object, name: str) -> None:
    """Name a function after the attribute it is set to, so that it can be pickled."""
    if not isinstance(stand_in, FunctionType) or _is_found(stand_in):
        return
    if isinstance(owner, ModuleType):
        stand_in.__module__, stand_in.__qualname__ = owner.__name__, name
    elif isinstance(owner, type):
        stand_in.__module__, stand_in.__qualname__ = owner.__module__, f"{owner.__name__}.{name}"


def scripted(stand_ins: list[tuple[object, object]]) -> dict[int, str]:
    """Return the script compiler's table of builtin functions with the stand-ins added."""
    table: dict[int, str] = dict(_builtins._get_builtin_table())  # type: ignore[no-untyped-call]
    for original, stand_in in stand_ins:
        if id(original) in table:
            table[id(stand_in)] = table[id(original)]
    return table


def clear_function_caches() -> None:
    """Have torch list its overridable functions and its tensor constructors again."""
    for function in (*vars(overrides).values(), default_device._device_constructors):
        cached: Any = inspect.unwrap(function, stop=_is_cache) if callable(function) else None
        if _is_cache(cached):
            cached.cache_clear()


def _is_cache(function: Any) -> bool:
    return hasattr(function, "cache_clear")


def _is_found(function: FunctionType) -> bool:
    module = sys.modules.get(function.__module__ or "")
    try:
        return operator.attrgetter(function.__qualname__)(module) is function
    except AttributeError:
        return False


def _knowing_both(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def try_ann_to_type(ann: Any, *args: Any, **kwargs: Any) -> Any:
        # The reader compares by identity; equality holds for the class of torch as well.
        for kind in (torch.device, torch.Generator):
            if ann == kind:
                ann = kind
        return original(ann, *args, **kwargs)

    return try_ann_to_type


def _constructors(listed: Any) -> Callable[[], set[Any]]:
    """List what `with torch.device(...)` applies to: torch's functions and their stand-ins."""
    listed.cache_clear()
    standing: set[Any] = listed()
    both = standing | {inspect.unwrap(each) for each in standing}

    def _device_constructors() -> set[Any]:
        # torch.compile traces what stands in torch, and the list of that as torch makes it.
        listed_now: set[Any] = listed() if torch.compiler.is_compiling() else both
        return listed_now

    return _device_constructors
