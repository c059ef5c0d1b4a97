"""Look up a raw attribute (descriptors stay descriptors) and the place that holds it."""

from __future__ import annotations

import gc
import sys
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
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
    """Tell whether others that hold the same object hold a copy of what `module` defines.

    Constants, enum members and the like are shared by chance, and an object that another package
    defines (a torch function reached through a Megatron module) is held in its own right.
    """
    package = module.partition(".")[0]
    if value is MISSING or isinstance(value, (Enum, ModuleType)):
        return False
    if not callable(value):
        own_kind = str(type(value).__module__).partition(".")[0] == package
        return own_kind or isinstance(value, (dict, list, set, property))
    home = str(getattr(value, "__module__", None) or "")
    if isinstance(value, BuiltinFunctionType) or home.partition(".")[0] == package:
        return home.partition(".")[0] == package
    found: Any = sys.modules.get(home)
    for part in str(getattr(value, "__qualname__", "?")).split("."):
        found = getattr(found, part, None)
    return found is not value  # not what its name says: made here, by a foreign decorator


def is_alone(place: Slot) -> bool:
    """Tell whether it is certain that nothing but this place holds its function or class.

    The interpreter counts the references to an object: if all of them are accounted for, there is
    no copy and nothing to search. Anything unexpected only means that a search is made.
    """
    kind = type(place.read())
    if kind is not FunctionType and not issubclass(kind, type):
        return False
    return _references(place) - _own_references(place.read()) == _ALONE


def _references(place: Slot) -> int:
    return sys.getrefcount(place.read())


def _own_references(value: Any) -> int:
    """Count how often a class is referred to by its own parts and by its subclasses."""
    if not isinstance(value, type):
        return 0
    holders: list[object] = list(vars(value).values())
    for member in vars(value).values():
        holders.extend(getattr(unwrap(member), "__closure__", None) or ())
    family = [value]
    for cls in family:
        holders.extend((cls, cls.__mro__, cls.__bases__))
        family.extend(type.__subclasses__(cls))
    distinct = {id(holder): holder for holder in holders}.values()
    return sum(each is value for each in gc.get_referents(*distinct))


_ALONE = _references(Slot({"only": lambda: None}, "only"))
