"""Places that hold an object (names, entries, defaults, closure cells) and how to rewrite them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MethodType
from typing import Any

MISSING = object()


class Slot:
    """An entry of a dict or a list; subclasses are the other kinds of places."""

    def __init__(self, container: Any, key: Any) -> None:
        self.container = container
        self.key = key

    @property
    def identity(self) -> tuple[type, int, object]:
        """Equal for two slots that are the same place; valid while either slot lives."""
        key = self.key if isinstance(self.key, (str, int)) else id(self.key)
        return type(self), id(self.container), key

    def read(self) -> object:
        """Return what is held now, or MISSING."""
        if isinstance(self.container, dict):
            return dict.get(self.container, self.key, MISSING)  # a defaultdict stays as it is
        return self.container[self.key] if self.key < len(self.container) else MISSING

    def write(self, value: object) -> None:
        """Hold `value`; MISSING empties the place."""
        if value is MISSING:
            del self.container[self.key]
        else:
            self.container[self.key] = value


class ClassAttribute(Slot):
    """An attribute in the class's own namespace."""

    def read(self) -> object:
        """Return the raw attribute (a staticmethod stays one), or MISSING when not its own."""
        return vars(self.container).get(self.key, MISSING)

    def write(self, value: object) -> None:
        """Set the attribute through the class, which keeps its method cache right."""
        if value is MISSING:
            delattr(self.container, self.key)
        else:
            setattr(self.container, self.key, value)


class Attribute(Slot):
    """An attribute without a namespace dict: `__defaults__`, `cell_contents`, `__slots__`."""

    def read(self) -> object:
        """Return the attribute, or MISSING (a slot not set, an empty cell)."""
        try:
            return getattr(self.container, self.key)
        except (AttributeError, ValueError):
            return MISSING

    def write(self, value: object) -> None:
        """Set the attribute, also on frozen dataclasses."""
        object.__setattr__(self.container, self.key, value)


class PartialPart(Attribute):
    """`func` or `args` of a functools.partial, which are read-only one by one."""

    def write(self, value: object) -> None:
        """Give the partial a new state with this part exchanged."""
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
        """Members are told apart by object identity, not by equality."""
        return Member, id(self.container), id(self.key)

    def read(self) -> object:
        """Return the member, or MISSING once somebody removed it."""
        return self._held if any(each is self._held for each in self.container) else MISSING

    def write(self, value: object) -> None:
        """Exchange the member; the order of a dict stays."""
        members = [value if each is self._held else each for each in self.container]
        hash(value)  # fail before the container is emptied
        if isinstance(self.container, dict):
            entries = list(zip(members, self.container.values()))
            self.container.clear()
            self.container.update(entries)
        else:
            self.container.clear()
            self.container.update(members)
        self._held = value


SHELLS = (tuple, staticmethod, classmethod, property, MethodType)


def shell_parts(shell: Any) -> tuple[object, ...]:
    """Return what an immutable holder holds; () for anything that is not one."""
    kind = type(shell)  # isinstance would ask foreign objects for their __class__
    if issubclass(kind, tuple):
        return tuple.__getitem__(shell, slice(None))
    if issubclass(kind, (staticmethod, classmethod)):
        return (shell.__func__,)
    if issubclass(kind, property):
        return (shell.fget, shell.fset, shell.fdel)
    if issubclass(kind, MethodType):
        return (shell.__func__, shell.__self__)
    return ()


def swap(value: Any, exchange: Mapping[int, object]) -> Any:
    """Return `value` with objects exchanged by id, rebuilding the immutable holders around them."""
    if id(value) in exchange:
        return exchange[id(value)]
    parts = shell_parts(value)
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
