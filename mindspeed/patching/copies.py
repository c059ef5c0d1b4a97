"""Copies of patched objects: find the slots that hold them, rebind them and restore them.

The search walks modules from their names downwards. It opens namespaces, collections, functions
(defaults, closures), partials, classes and objects of interested classes. It only goes downwards:
what a wrapper that is not installed yet keeps for itself (the original) is never found.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field
from functools import cached_property, partial, partialmethod
from types import FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from mindspeed.patching.slots import (
    IMMUTABLE,
    MISSING,
    Attribute,
    ClassAttribute,
    Member,
    PartialPart,
    Slot,
    parts_of,
    swap,
    unwrap,
)

if TYPE_CHECKING:
    from mindspeed.patching.patch import Entry
    from mindspeed.patching.patcher import Content, Target

# A container beyond this size is data, not a table of functions.
_LARGEST = 10_000
# Names that mention a class without using it, and a namespace that is not the module's own.
_SKIPPED = frozenset({"__annotations__", "__orig_bases__", "__builtins__"})
_OURSELVES = __name__.rpartition(".")[0] + "."
_STDLIB = os.path.dirname(os.__file__) + os.sep
_SITE, _DIST = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"

# Slots of one kind in one container: the kind, the container, (key, what is held) pairs.
_Slots = tuple[type[Slot], Any, Iterable[tuple[Any, Any]]]
_Opener = Callable[[Any], Iterator[_Slots]]
# The slots that hold an object, by its id, each with the module whose code it belongs to.
_Finds = dict[int, list[tuple[Slot, str]]]


class Survey:
    """Before targets change: who holds their current contents, and who holds the new ones."""

    def __init__(
        self,
        targets: Collection[Target],
        groups: Mapping[Target, list[Entry]],
        packages: Collection[str],
    ) -> None:
        self._targets = [target for target in targets if target.follows]
        self._groups = groups
        self._packages = {each.module.partition(".")[0] for each in targets}.union(packages)
        self._searched: set[str] = set()
        self._finds: _Finds = defaultdict(list)
        entries = [entry for target in self._targets for entry in groups.get(target, ())]
        self._coming = {id(each.value) for each in entries if each.is_shared("replace")}

    def search(self) -> bool:
        """Search the modules that were not searched yet; return whether there were any.

        Call it before any factory runs, since what a factory keeps of the original is no copy, and
        again for the modules that factories imported.
        """
        is_first, fresh = not self._searched, set(sys.modules) - self._searched
        self._searched |= fresh
        held = [
            target.held_ids()
            for target in self._targets
            if target.entries or not (is_first and target.alone)
        ]
        self._find(self._coming.union(*held), fresh)
        return bool(fresh)

    def search_for_made(self, contents: Mapping[Target, Content]) -> None:
        """Search for what factories returned, unless it is certainly new."""
        made = (
            id(unwrap(content.value))
            for target, content in contents.items()
            if target.follows and (last := content.last) and last.is_shared("wrap")
        )
        self._find(set(made), self._searched)

    def copies(self) -> Iterator[tuple[Slot, Target]]:
        """Yield the slots that hold a copy of a target."""
        for target in self._targets:
            for slot, module in self._holders(target.current):
                if target.accepts(slot, module) and not self._builds_on(target, module):
                    yield slot, target

    def with_bystanders(self, target: Target, content: Content) -> Content:
        """Add to `content` the slots that hold its value without being copies of the target."""
        if not content.entries or content.value is target.current:
            return content._replace(bystanders=target.content.bystanders)
        slots = [slot for slot, _ in self._holders(content.value)]
        return content._replace(bystanders={slot.identity: slot for slot in slots})

    def _builds_on(self, target: Target, module: str) -> bool:
        """The module that defines a replacement refers to the original in order to use it."""
        entries = self._groups.get(target, ())
        return any(each.patch.kind == "replace" and each.home == module for each in entries)

    def _holders(self, value: Any) -> list[tuple[Slot, str]]:
        return [find for each in {id(value), id(unwrap(value))} for find in self._finds[each]]

    def _find(self, wanted: Collection[int], names: Collection[str]) -> None:
        if wanted and names:
            modules = _interested_modules(self._packages)
            roots = {name: module for name, module in modules.items() if name in names}
            _find_slots(wanted, roots, modules, self._finds)


@dataclass(eq=False)
class _Holder:
    """A slot with what it held without any patch and what was put there last."""

    slot: Slot
    original: object
    placed: object
    targets: set[Target] = field(default_factory=set)


class Copies:
    """Every slot, other than the targets themselves, that was rebound."""

    def __init__(self) -> None:
        self._holders: dict[object, _Holder] = {}

    def add(self, slot: Slot, target: Target) -> None:
        """Let `slot`, which holds the target's current content, follow the target."""
        holder = self._holders.get(slot.identity)
        if holder is None or holder.slot.read() is not holder.placed:
            held = slot.read()
            holder = self._holders[slot.identity] = _Holder(slot, held, held)
        holder.original = swap(holder.original, target.exchange(target.current, target.original))
        holder.targets.add(target)

    def rebind(self, targets: Collection[Target]) -> None:
        """Bring the slots that follow any of `targets` up to date."""
        for identity, holder in list(self._holders.items()):
            if holder.targets.isdisjoint(targets):
                continue
            if holder.slot.read() is not holder.placed:
                del self._holders[identity]  # other code has changed it since
                continue
            exchange: dict[int, object] = {}
            for target in holder.targets:
                exchange.update(target.exchange(target.original, target.current))
            value = swap(holder.original, exchange)
            if value is not holder.placed:
                holder.slot.write(value)
                holder.placed = value
            holder.targets = {target for target in holder.targets if target.entries}
            if not holder.targets:
                del self._holders[identity]

    def count(self, target: Target) -> int:
        """Return how many slots follow `target`."""
        return sum(target in holder.targets for holder in self._holders.values())


def _interested_modules(packages: Collection[str]) -> dict[str, ModuleType]:
    """Return the loaded modules of `packages`, of MindSpeed and of the user's own code."""
    # By the true type: a library of cffi in sys.modules only claims to be a module.
    return {
        name: module
        for name, module in list(sys.modules.items())
        if issubclass(type(module), ModuleType) and _is_interesting(name, module, packages)
    }


def _is_interesting(name: str, module: ModuleType, packages: Collection[str]) -> bool:
    top = name.partition(".")[0]
    if top not in packages and top != "__main__" and not top.startswith("mindspeed"):
        file = _namespace_of(module).get("__file__")
        if not isinstance(file, str) or _SITE in file or _DIST in file or file.startswith(_STDLIB):
            return False
    return not f"{name}.".startswith(_OURSELVES)


def _namespace_of(module: ModuleType) -> dict[str, Any]:
    """Return the module's dict without waking a lazily loaded module."""
    namespace: dict[str, Any] = ModuleType.__getattribute__(module, "__dict__")
    return namespace


def _find_slots(
    wanted: Collection[int],
    roots: Mapping[str, ModuleType],
    modules: Collection[str],
    finds: _Finds,
) -> None:
    """Add the slots under `roots` that hold a wanted id; open classes of `modules` only."""
    seen: set[int] = set()
    openers = _Openers(modules)
    stack: list[tuple[Any, str]] = [(_namespace_of(root), name) for name, root in roots.items()]
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
                leaves = _leaves(value) if inside is _open_immutable else (value,)
                for leaf in leaves:
                    stack.append((leaf, module))
                    if id(leaf) in wanted:
                        finds[id(leaf)].append((kind(holder, key), module))


def _leaves(holder: object) -> list[object]:
    """Return an immutable holder and everything inside it and inside the ones it holds."""
    leaves = [holder]
    for leaf in leaves:
        leaves.extend(parts_of(leaf))
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


def _open_immutable(holder: object) -> Iterator[_Slots]:
    """Open nothing: what an immutable object holds is changed where the object is held."""
    return iter(())


def _open_class(cls: type) -> Iterator[_Slots]:
    yield ClassAttribute, cls, list(vars(cls).items())


def _open_function(function: FunctionType) -> Iterator[_Slots]:
    if function.__defaults__:
        yield Attribute, function, [("__defaults__", function.__defaults__)]
    for namespace in (function.__kwdefaults__, function.__dict__):
        if namespace:
            yield from _open_collection(namespace)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        # super() finds its class in this cell; a subclass put there would call itself for ever.
        if name != "__class__":
            yield _attributes(cell, ("cell_contents",))


def _open_collection(collection: Any) -> Iterator[_Slots]:
    if len(collection) > _LARGEST:
        return
    if isinstance(collection, list):
        yield Slot, collection, list(enumerate(collection))
        return
    yield Member, collection, [(each, each) for each in list(collection) if type(each) is not str]
    if isinstance(collection, dict):
        yield Slot, collection, list(dict.items(collection))


def _open_partial(call: partial[Any]) -> Iterator[_Slots]:
    yield PartialPart, call, [("func", call.func), ("args", call.args)]
    yield from _open_collection(call.keywords)


def _open_field(field: Field[Any]) -> Iterator[_Slots]:
    yield _attributes(field, ("default", "default_factory"))


def _open_instance(instance: object) -> Iterator[_Slots]:
    try:
        namespace = object.__getattribute__(instance, "__dict__")
    except AttributeError:
        namespace = {}  # a class with __slots__ only
    yield from _open_collection(namespace)
    for base in type(instance).__mro__:
        names = [name for name, value in vars(base).items() if type(value) is MemberDescriptorType]
        yield _attributes(instance, names)


def _attributes(holder: object, names: Iterable[str]) -> _Slots:
    held = [(name, Attribute(holder, name).read()) for name in names]
    return Attribute, holder, [pair for pair in held if pair[1] is not MISSING]


_BY_TYPE: list[tuple[tuple[type, ...], _Opener | None]] = [
    ((FunctionType,), _open_function),
    ((type,), _open_class),
    (IMMUTABLE, _open_immutable),
    ((dict, list, set), _open_collection),
    ((partial,), _open_partial),
    ((Field,), _open_field),
    ((ModuleType,), None),
    ((SimpleNamespace, partialmethod, cached_property), _open_instance),
]
