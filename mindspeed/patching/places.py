"""Look up a raw attribute (descriptors stay descriptors) and the place that holds it."""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType
from typing import Any

from mindspeed.patching.slots import MISSING, ClassAttribute, Slot


def place_of(container: Any, name: str) -> Slot:
    """Return the place where `container` holds, or would hold, its own attribute `name`."""
    if isinstance(container, type):
        return ClassAttribute(container, name)
    return Slot(vars(container), name)


def look_up(container: Any, name: str) -> Any:
    """Return the attribute as the container or its base classes hold it, or MISSING."""
    if isinstance(container, type):
        return next((vars(cls)[name] for cls in container.__mro__ if name in vars(cls)), MISSING)
    namespace = vars(container) if hasattr(container, "__dict__") else {}
    return namespace[name] if name in namespace else getattr(container, name, MISSING)


def unwrap(raw: Any) -> Any:
    """Return the function inside a staticmethod or classmethod, anything else as it is."""
    return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw


def rewrap(value: Any, like: Any) -> Any:
    """Make `value` a staticmethod or classmethod if `like` is one."""
    return type(like)(unwrap(value)) if isinstance(like, (staticmethod, classmethod)) else value


def is_followed(value: Any, module: str) -> bool:
    """Tell whether copies of what `module` holds are copies of its own object.

    Constants are shared by chance, and an object that another package defines (a torch function
    reached through a Megatron module) is held by others in its own right.
    """
    constants = (str, bytes, int, float, complex, type(None), tuple, frozenset, ModuleType)
    if value is MISSING or isinstance(value, constants):
        return False
    home, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not home or not name or home.partition(".")[0] == module.partition(".")[0]:
        return True
    found: Any = sys.modules.get(home)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not value


def is_alone(place: Slot) -> bool:
    """Tell whether the place holds a function to which there is no other reference at all."""
    return _references(place) == _ALONE and type(place.read()) is FunctionType


def _references(place: Slot) -> int:
    return sys.getrefcount(place.read())


_ALONE = _references(Slot({"only": lambda: None}, "only"))
