"""Search modules, from their names downwards, for the places that hold an object.

The walk opens namespaces, collections, functions (defaults, closures), partials, classes and
objects of interested classes. It only goes downwards: what a wrapper that is not installed yet
keeps for itself (the original) is never found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import Field
from functools import cached_property, partial, partialmethod
from types import FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from mindspeed.patching.scope import namespace_of
from mindspeed.patching.slots import (
    MISSING,
    SHELLS,
    Attribute,
    ClassAttribute,
    Member,
    PartialPart,
    Slot,
    shell_parts,
)

# A container beyond this size is data, not a table of functions.
_LARGEST = 10_000
# Names that mention a class without using it, and a namespace that is not the module's own.
_SKIPPED = frozenset({"__annotations__", "__orig_bases__", "__builtins__"})

# Places of one kind in one container: the kind, the container, (key, what is held) pairs.
_Places = tuple[type[Slot], Any, Iterable[tuple[Any, Any]]]
_Opener = Callable[[Any], Iterator[_Places]]


class Find(NamedTuple):
    """A place, the module whose code it belongs to, and the ids of the wanted objects in it."""

    slot: Slot
    module: str
    found: list[int]


def find_places(
    wanted: Collection[int], roots: Mapping[str, ModuleType], modules: Collection[str]
) -> list[Find]:
    """Find the places under `roots` that hold a wanted id; open classes of `modules` only."""
    finds: list[Find] = []
    seen: set[int] = set()
    openers = _Openers(modules)
    stack: list[tuple[Any, str]] = [(namespace_of(root), name) for name, root in roots.items()]
    while stack:
        container, module = stack.pop()
        opener = openers[type(container)]
        if opener is None or id(container) in seen:
            continue
        seen.add(id(container))
        if opener is _open_class or opener is _open_function:
            module = container.__module__ or module
            if opener is _open_class and module not in modules:
                continue
        for kind, holder, pairs in opener(container):
            for key, value in pairs:
                inside = openers[type(value)]
                if (inside is None and id(value) not in wanted) or key in _SKIPPED:
                    continue
                leaves = _leaves(value) if inside is _open_shell else (value,)
                found = []
                for leaf in leaves:
                    stack.append((leaf, module))
                    if id(leaf) in wanted:
                        found.append(id(leaf))
                if found:
                    finds.append(Find(kind(holder, key), module, found))
    return finds


def _leaves(shell: object) -> list[object]:
    """Return the shell and everything inside it and inside the shells it holds."""
    leaves = [shell]
    for leaf in leaves:
        leaves.extend(shell_parts(leaf))
    return leaves


class _Openers(dict[type, "_Opener | None"]):
    """How to open an object, by its type; None for what holds nothing of interest."""

    def __init__(self, modules: Collection[str]) -> None:
        super().__init__()
        self._modules = modules

    def __missing__(self, kind: type) -> _Opener | None:
        # By the true type: isinstance would ask proxies and mocks for their __class__.
        known = [opener for kinds, opener in _BY_TYPE if issubclass(kind, kinds)]
        ours = _open_instance if kind.__module__ in self._modules else None
        self[kind] = opener = known[0] if known else ours
        return opener


def _open_shell(shell: object) -> Iterator[_Places]:
    """Open nothing: what an immutable object holds is changed where the object is held."""
    return iter(())


def _open_class(cls: type) -> Iterator[_Places]:
    yield ClassAttribute, cls, list(vars(cls).items())


def _open_function(function: FunctionType) -> Iterator[_Places]:
    if function.__defaults__:
        yield Attribute, function, [("__defaults__", function.__defaults__)]
    for namespace in (function.__kwdefaults__, function.__dict__):
        if namespace:
            yield from _open_collection(namespace)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        # super() finds its class in this cell; a subclass put there would call itself for ever.
        if name != "__class__":
            yield _attributes(cell, ("cell_contents",))


def _open_collection(collection: Any) -> Iterator[_Places]:
    if len(collection) > _LARGEST:
        return
    if isinstance(collection, list):
        yield Slot, collection, list(enumerate(collection))
        return
    yield Member, collection, [(each, each) for each in list(collection) if type(each) is not str]
    if isinstance(collection, dict):
        yield Slot, collection, list(dict.items(collection))


def _open_partial(call: partial[Any]) -> Iterator[_Places]:
    yield PartialPart, call, [("func", call.func), ("args", call.args)]
    yield from _open_collection(call.keywords)


def _open_field(field: Field[Any]) -> Iterator[_Places]:
    yield _attributes(field, ("default", "default_factory"))


def _open_instance(instance: object) -> Iterator[_Places]:
    try:
        namespace = object.__getattribute__(instance, "__dict__")
    except AttributeError:
        namespace = {}  # a class with __slots__ only
    yield from _open_collection(namespace)
    for base in type(instance).__mro__:
        slots = [name for name, value in vars(base).items() if type(value) is MemberDescriptorType]
        yield _attributes(instance, slots)


def _attributes(holder: object, names: Iterable[str]) -> _Places:
    held = [(name, Attribute(holder, name).read()) for name in names]
    return Attribute, holder, [pair for pair in held if pair[1] is not MISSING]


_BY_TYPE: list[tuple[tuple[type, ...], _Opener | None]] = [
    ((FunctionType,), _open_function),
    ((type,), _open_class),
    (SHELLS, _open_shell),
    ((dict, list, set), _open_collection),
    ((partial,), _open_partial),
    ((Field,), _open_field),
    ((ModuleType,), None),
    ((SimpleNamespace, partialmethod, cached_property), _open_instance),
]
