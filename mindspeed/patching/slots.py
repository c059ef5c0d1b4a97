"""Slots: the names, entries, defaults and cells that hold an object; how to find and to set them.

The search walks modules from their names downwards. It opens namespaces, collections, functions
(defaults, closures), partials, classes and objects of interested classes. It only goes downwards:
what a wrapper that is not installed yet keeps for itself (the original) is never found.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import Field
from functools import cached_property, partial, partialmethod
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
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
        part: partial[Any] = self.container
        func, args = (value, part.args) if self.key == "func" else (part.func, value)
        part.__setstate__((func, args, part.keywords, vars(part)))  # type: ignore[attr-defined]


class Member(Slot):
    """A key of a dict or an element of a set; `key` is the object found there first."""

    def __init__(self, container: Any, key: Any) -> None:
        super().__init__(container, key)
        self._held = key

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


def has_no_copy(slot: Slot) -> bool:
    """Return whether it is certain that nothing but this slot holds its function.

    A function whose only reference is the slot needs no search, which takes about 50 ms with
    Megatron loaded. Other objects refer to themselves (a class, by its methods): search for them.
    """
    return type(slot.read()) is FunctionType and _references(slot) == _SOLE


def _references(slot: Slot) -> int:
    return sys.getrefcount(slot.read())


_SOLE = _references(Slot({"only": lambda: None}, "only"))

# Objects that are rebuilt, where they are held, when what they hold is exchanged.
_IMMUTABLE = (tuple, staticmethod, classmethod, property, MethodType)


def _parts(value: Any) -> tuple[object, ...]:
    """Return what an immutable holder holds; () for anything that is not one."""
    kind = type(value)  # isinstance would ask foreign objects for their __class__
    if issubclass(kind, tuple):
        return tuple.__getitem__(value, slice(None))
    if issubclass(kind, (staticmethod, classmethod)):
        return (value.__func__,)
    if issubclass(kind, property):
        return (value.fget, value.fset, value.fdel)
    return (value.__func__, value.__self__) if issubclass(kind, MethodType) else ()


def swap(value: Any, exchange: Mapping[int, object]) -> Any:
    """Return `value` with objects exchanged by id, rebuilding the immutable holders around them."""
    if id(value) in exchange:
        return exchange[id(value)]
    parts = _parts(value)
    new = [swap(part, exchange) for part in parts]
    if all(after is before for after, before in zip(new, parts)):
        return value
    if isinstance(value, tuple):
        make = getattr(value, "_make", None) or (tuple if type(value) is tuple else None)
        return make(new) if make else value
    if isinstance(value, property):
        return type(value)(new[0], new[1], new[2], value.__doc__)
    return type(value)(*new)


# A container beyond this size is data, not a table of functions.
_LARGEST = 10_000
# Names that mention a class without using it, and a namespace that is not the module's own. Of the
# collections in our modules four fifths are in pydantic's schemas, which are compiled and unused.
_SKIPPED = frozenset(
    {"__annotations__", "__orig_bases__", "__builtins__", "__pydantic_core_schema__"}
)
_OURSELVES = __name__.rpartition(".")[0] + "."
_STDLIB = os.path.dirname(os.__file__) + os.sep
_SITE, _DIST = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"

# How to open an object, by the first type that fits; None for what holds nothing of interest.
_KINDS: tuple[tuple[type | tuple[type, ...], str | None], ...] = (
    (FunctionType, "function"),
    (type, "class"),
    (_IMMUTABLE, "immutable"),
    ((dict, list, set), "collection"),
    (partial, "partial"),
    (Field, "field"),
    (ModuleType, None),
    ((SimpleNamespace, partialmethod, cached_property), "instance"),
)
# Slots of one kind in one container: the kind, the container, (key, what is held) pairs.
_Slots = tuple[type[Slot], Any, Iterable[tuple[Any, Any]]]


class _Kinds(dict[type, "str | None"]):
    """How to open an object, by its type; of other types only those that `modules` define."""

    def __init__(self, modules: Collection[str]) -> None:
        super().__init__()
        self._modules = modules

    def __missing__(self, cls: type) -> str | None:
        # By the true type: isinstance would ask proxies and mocks for their __class__.
        known = [kind for types, kind in _KINDS if issubclass(cls, types)]
        ours = "instance" if cls.__module__ in self._modules else None
        self[cls] = kind = known[0] if known else ours
        return kind


class Search:
    """The slots of loaded modules that hold some objects, each with the module it belongs to.

    Looks into `packages`, MindSpeed and the user's own code.
    """

    def __init__(self, packages: Collection[str]) -> None:
        self._packages = packages
        self._searched: set[str] = set()
        self._found: dict[int, list[tuple[Slot, str]]] = defaultdict(list)

    def holders(self, value: object) -> list[tuple[Slot, str]]:
        """Return the slots that were found to hold a value, raw or unwrapped."""
        return [found for each in ids_of(value) for found in self._found[each]]

    def new_modules(self, wanted: Collection[int]) -> bool:
        """Search modules that were not searched before; return whether there were any."""
        fresh = set(sys.modules) - self._searched
        self._searched |= fresh
        self._find(wanted, fresh)
        return bool(fresh)

    def all_modules(self, wanted: Collection[int]) -> None:
        """Search all modules that were searched before."""
        self._find(wanted, self._searched)

    def _find(self, wanted: Collection[int], names: Collection[str]) -> None:
        """Add the slots in modules of these names that hold an object of a wanted id."""
        if not wanted or not names:
            return
        modules = _interesting_modules(self._packages)
        kinds, seen = _Kinds(modules), set[int]()
        stack: list[tuple[Any, str]] = [(modules[n], n) for n in modules if n in names]
        while stack:
            container, module = stack.pop()
            kind = kinds[type(container)]
            if kind is None or id(container) in seen:
                continue
            seen.add(id(container))
            if kind == "class" or kind == "function":
                module = container.__module__ or module
                if kind == "class" and module not in modules:
                    continue
            for slot, holder, pairs in _open(container, kind):
                for key, value in pairs:
                    inside = kinds[type(value)]
                    if (inside is None and id(value) not in wanted) or key in _SKIPPED:
                        continue
                    for leaf in _leaves(value) if inside == "immutable" else (value,):
                        stack.append((leaf, module))
                        if id(leaf) in wanted:
                            self._found[id(leaf)].append((slot(holder, key), module))


def ids_of(raw: Any) -> set[int]:
    """Return the ids by which copies of a raw attribute are known."""
    return {id(raw), id(unwrap(raw))}


def _interesting_modules(packages: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the names of modules by module, without waking those that are loaded lazily."""
    # By the true type: a library of cffi in sys.modules only claims to be a module.
    modules = {
        name: ModuleType.__getattribute__(module, "__dict__")
        for name, module in list(sys.modules.items())
        if issubclass(type(module), ModuleType) and not f"{name}.".startswith(_OURSELVES)
    }
    return {name: names for name, names in modules.items() if _is_ours(name, names, packages)}


def _is_ours(name: str, names: Mapping[str, Any], packages: Collection[str]) -> bool:
    top, file = name.partition(".")[0], names.get("__file__")
    if top in packages or top == "__main__" or top.startswith("mindspeed"):
        return True
    is_user_code = isinstance(file, str) and _SITE not in file and _DIST not in file
    return is_user_code and not str(file).startswith(_STDLIB)


def _leaves(holder: object) -> list[object]:
    """Return an immutable holder and everything inside it and inside the ones it holds."""
    leaves = [holder]
    for leaf in leaves:
        leaves.extend(_parts(leaf))
    return leaves


def _open(holder: Any, kind: str) -> Iterator[_Slots]:
    """Yield the slots of an object; an immutable one has none, it is changed where it is held."""
    if kind == "class":
        yield ClassAttribute, holder, list(vars(holder).items())
    elif kind == "collection" and len(holder) <= _LARGEST:
        if isinstance(holder, list):
            yield Slot, holder, list(enumerate(holder))
            return
        yield Member, holder, [(each, each) for each in list(holder) if type(each) is not str]
        if isinstance(holder, dict):
            yield Slot, holder, list(dict.items(holder))
    elif kind == "function":
        if holder.__defaults__:
            yield _attributes(holder, ("__defaults__",))
        for namespace in (holder.__kwdefaults__, holder.__dict__):
            if namespace:
                yield from _open(namespace, "collection")
        for name, cell in zip(holder.__code__.co_freevars, holder.__closure__ or ()):
            # super() finds its class in this cell; a subclass put there would call itself for ever.
            if name != "__class__":
                yield _attributes(cell, ("cell_contents",))
    elif kind == "partial":
        yield PartialPart, holder, [("func", holder.func), ("args", holder.args)]
        yield from _open(holder.keywords, "collection")
    elif kind == "field":
        yield _attributes(holder, ("default", "default_factory"))
    elif kind == "instance":
        with suppress(AttributeError):  # a class with __slots__ only
            yield from _open(object.__getattribute__(holder, "__dict__"), "collection")
        for base in type(holder).__mro__:
            members = vars(base).items()
            yield _attributes(holder, [n for n, m in members if type(m) is MemberDescriptorType])


def _attributes(holder: object, names: Iterable[str]) -> _Slots:
    held = [(name, Attribute(holder, name).read()) for name in names]
    return Attribute, holder, [pair for pair in held if pair[1] is not MISSING]
