"""Slots: the names, entries, defaults and cells that hold an object, and how to set them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any

MISSING = object()


class Slot:
    """An entry of a dict or a list; subclasses are the other kinds of slots."""

    def __init__(self, container: Any, key: Any) -> None:
        self.container = container
        self.key = key

    @property
    def identity(self) -> tuple[type, int, object]:
        """Equal for two objects that describe the same slot; valid while either lives."""
        key = self.key if isinstance(self.key, (str, int)) else id(self.key)
        return type(self), id(self.container), key

    def read(self) -> object:
        """Return what is held now, or MISSING."""
        if isinstance(self.container, dict):
            return dict.get(self.container, self.key, MISSING)  # a defaultdict stays as it is
        return self.container[self.key] if self.key < len(self.container) else MISSING

    def write(self, value: object) -> None:
        """Hold `value`; MISSING empties the slot."""
        if value is MISSING:
            del self.container[self.key]
        else:
            self.container[self.key] = value


class ClassAttribute(Slot):
    """A raw attribute (a staticmethod stays one) in the class's own namespace."""

    def read(self) -> object:
        return vars(self.container).get(self.key, MISSING)

    def write(self, value: object) -> None:
        # Through the class, which keeps its method cache right.
        if value is MISSING:
            delattr(self.container, self.key)
        else:
            setattr(self.container, self.key, value)


class Attribute(Slot):
    """An attribute without a namespace dict: `__defaults__`, `cell_contents`, `__slots__`."""

    def read(self) -> object:
        try:
            return getattr(self.container, self.key)
        except (AttributeError, ValueError):  # a slot that is not set, an empty cell
            return MISSING

    def write(self, value: object) -> None:
        object.__setattr__(self.container, self.key, value)  # also on frozen dataclasses


class PartialPart(Attribute):
    """`func` or `args` of a functools.partial, which are read-only one by one."""

    def write(self, value: object) -> None:
        part: functools.partial[Any] = self.container
        func, args = (value, part.args) if self.key == "func" else (part.func, value)
        part.__setstate__((func, args, part.keywords, vars(part)))  # type: ignore[attr-defined]


class Member(Slot):
    """A key of a dict or an element of a set; `key` is the object found there first."""

    def __init__(self, container: Any, key: Any) -> None:
        super().__init__(container, key)
        self._held = key

    @property
    def identity(self) -> tuple[type, int, object]:
        """Members are distinguished by object identity, not by equality."""
        return Member, id(self.container), id(self.key)

    def read(self) -> object:
        return self._held if any(each is self._held for each in self.container) else MISSING

    def write(self, value: object) -> None:
        members = [value if each is self._held else each for each in self.container]
        hash(value)  # fail before the container is emptied
        # Emptied and refilled, which keeps the order of a dict.
        is_dict = isinstance(self.container, dict)
        entries = list(zip(members, self.container.values())) if is_dict else members
        self.container.clear()
        self.container.update(entries)
        self._held = value


def slot_of(container: Any, name: str) -> Slot:
    """Return the slot in which `container` holds, or would hold, its own attribute `name`."""
    if isinstance(container, type):
        return ClassAttribute(container, name)
    return Slot(vars(container), name)


def look_up(container: Any, name: str) -> Any:
    """Return the raw attribute of the container or its base classes, or MISSING."""
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


IMMUTABLE = (tuple, staticmethod, classmethod, property, MethodType)
"""Objects that are rebuilt, where they are held, when what they hold is exchanged."""


def parts_of(value: Any) -> tuple[object, ...]:
    """Return what an immutable holder holds; () for anything that is not one."""
    kind = type(value)  # isinstance would ask foreign objects for their __class__
    if issubclass(kind, tuple):
        return tuple.__getitem__(value, slice(None))
    if issubclass(kind, (staticmethod, classmethod)):
        return (value.__func__,)
    if issubclass(kind, property):
        return (value.fget, value.fset, value.fdel)
    if issubclass(kind, MethodType):
        return (value.__func__, value.__self__)
    return ()


def swap(value: Any, exchange: Mapping[int, object]) -> Any:
    """Return `value` with objects exchanged by id, rebuilding the immutable holders around them."""
    if id(value) in exchange:
        return exchange[id(value)]
    parts = parts_of(value)
    new = [swap(part, exchange) for part in parts]
    if all(after is before for after, before in zip(new, parts)):
        return value
    if type(value) is tuple:
        return tuple(new)
    if isinstance(value, tuple):
        return value._make(new) if hasattr(value, "_make") else value
    if isinstance(value, property):
        return type(value)(new[0], new[1], new[2], value.__doc__)
    return type(value)(*new)


def has_no_copy(slot: Slot) -> bool:
    """Return whether it is certain that nothing but this slot holds its function.

    A function whose only reference is the slot needs no search, which takes about 50 ms with
    Megatron loaded. Other objects refer to themselves (a class, by its methods): search for them.
    """
    return type(slot.read()) is FunctionType and _references(slot) == _SOLE


def _references(slot: Slot) -> int:
    return sys.getrefcount(slot.read())


_SOLE = _references(Slot({"only": lambda: None}, "only"))
