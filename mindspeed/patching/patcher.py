"""Apply patches to other people's code, revert them, and report what is patched."""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

from mindspeed.patching.imports import (
    ImportHook,
    find_without_import,
    is_alias,
    is_imported,
    regular_package,
)
from mindspeed.patching.patch import (
    Patch,
    PatchError,
    PatchRecord,
    package_version,
    split_reference,
)
from mindspeed.patching.signatures import mismatch
from mindspeed.patching.slots import (
    MISSING,
    ClassAttribute,
    Search,
    Slot,
    has_no_copy,
    ids_of,
    look_up,
    slot_of,
    swap,
    unwrap,
)

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Entry:
    """A patch as its owner asked for it; its value and target are known when its module is."""

    owner: str
    level: int
    patch: Patch
    number: int
    value: Any = MISSING
    exclusive: bool = False  # nothing else holds what it puts into the target
    target: Target | None = None

    @property
    def order(self) -> tuple[bool, int, str, int]:
        """Sort replacements first, then wraps by level and owner."""
        return self.patch.kind == "wrap", self.level, self.owner, self.number

    @property
    def home(self) -> str:
        """The module that defines the value."""
        reference = split_reference(self.patch.value)
        return reference[0] if reference else str(getattr(self.value, "__module__", ""))

    def error(self, reason: str) -> PatchError:
        """Build an error that names this patch and the version of what it patches."""
        patch, version = self.patch, package_version(self.patch.module)
        return PatchError(f"{self.owner}: cannot {patch.kind} {patch.target} ({version}): {reason}")

    def awaits(self) -> str | None:
        """Return the module whose import has to end before this patch can be applied."""
        if not is_imported(self.patch.module):
            return self.patch.module
        module, name = split_reference(self.patch.value) or ("", "")
        if module not in sys.modules or is_imported(module):
            return None
        return None if hasattr(sys.modules[module], name.partition(".")[0]) else module

    @property
    def is_due(self) -> bool:
        """The modules of this patch are imported, and it is not applied yet."""
        return self.target is None and self.awaits() is None

    def load(self) -> None:
        """Import the value if it was given by name."""
        raw, reference = self.patch.value, split_reference(self.patch.value)
        if reference is not None:
            *path, last = reference[1].split(".")
            try:
                container = functools.reduce(getattr, path, importlib.import_module(reference[0]))
            except (ImportError, AttributeError) as error:
                raise self.error(f"cannot load {raw}: {error}") from error
            self.exclusive = has_no_copy(slot_of(container, last))
            if (raw := look_up(container, last)) is MISSING:
                raise self.error(f"cannot load {self.patch.value}: there is no {last}")
        # An addition keeps its own kind; other values take that of the original.
        self.value = raw if self.patch.kind == "add" else unwrap(raw)

    def make(self, before: Any, original: Any) -> Any:
        """Return what this patch makes of `before`; `original` is the unpatched object."""
        new, wraps = self.value, self.patch.kind == "wrap"
        if wraps:
            try:
                slot = Slot([self.value(before)], 0)
            except Exception as error:
                raise self.error(f"its factory failed: {error!r}") from error
            self.exclusive = has_no_copy(slot)
            new = unwrap(slot.read())
        reason = mismatch(original, new, forwards=wraps)
        if reason:
            raise self.error(reason)
        return new


class Content(NamedTuple):
    """What a target holds (raw, MISSING for nothing), made by `entries` from `base`."""

    value: Any
    base: Any
    entries: list[Entry]
    bystanders: Mapping[object, Slot] = {}  # slots that held the value before it came here

    @property
    def last(self) -> Entry | None:
        """The outermost patch, whose value is held."""
        return max(self.entries, key=lambda each: each.order, default=None)


@dataclass(eq=False)
class Target:
    """A patched slot; `original` is the raw attribute before any patch, MISSING for an addition."""

    module: str
    slot: Slot
    original: Any
    held: Any  # what the slot itself held: MISSING where the original came from a base class
    follows: bool  # copies of the original are rebound too
    alone: bool  # there was no copy when the target was found
    content: Content

    @classmethod
    def locate(cls, entry: Entry, container: Any, slot: Slot) -> Target:
        """Describe a slot that is not patched yet."""
        alone, original, held = has_no_copy(slot), look_up(container, slot.key), slot.read()
        if original is MISSING and entry.patch.kind != "add":
            raise entry.error(_no_such(container, slot.key))
        if original is not MISSING and entry.patch.kind == "add":
            raise entry.error("it exists already")
        module = entry.patch.module
        follows = held is not MISSING and _is_followed(unwrap(original), module)
        return cls(module, slot, original, held, follows, alone, Content(held, original, []))

    @property
    def entries(self) -> list[Entry]:
        """The patches in force."""
        return self.content.entries

    @property
    def in_class(self) -> bool:
        """The slot is an attribute of a class."""
        return isinstance(self.slot, ClassAttribute)

    @property
    def depth(self) -> int:
        """How many classes the patches may inherit from: bases are built first."""
        return len(self.slot.container.__mro__) if self.in_class else 0

    def base(self, built: Mapping[Target, Content]) -> Any:
        """Return the raw attribute that patches start from: an inherited one as it will be."""
        if self.original is self.held or not self.in_class:
            return self.original
        parents = [slot_of(cls, self.slot.key) for cls in self.slot.container.__mro__[1:]]
        by_slot = {each.slot.identity: content.value for each, content in built.items()}
        raw = (by_slot.get(slot.identity, slot.read()) for slot in parents)
        return next(each for each in raw if each is not MISSING)

    def build(self, entries: Collection[Entry], base: Any) -> Any:
        """Return what `entries` make of the raw attribute `base`."""
        if not entries:
            return self.held
        value = unwrap(base)
        for entry in sorted(entries, key=lambda each: each.order):
            value = entry.make(value, unwrap(base))
            is_method = self.in_class and isinstance(base, FunctionType)
            if is_method and not hasattr(type(value), "__get__"):
                raise entry.error(f"{value!r} would not receive self: give a function")
        if isinstance(base, (staticmethod, classmethod)):
            return type(base)(unwrap(value))
        return value

    def accepts(self, slot: Slot, module: str) -> bool:
        """Return whether a slot in `module` that holds the current content is a copy of it."""
        if not self.follows or slot.identity in (self.slot.identity, *self.content.bystanders):
            return False
        last = self.content.last
        if last is None or last.patch.kind == "wrap":
            return True
        # A replacement is also held, in its own right, by the package it comes from.
        return module.partition(".")[0] != last.home.partition(".")[0]


_Groups = Mapping[Target, list[Entry]]


@dataclass(eq=False)
class _Binding:
    """A slot, of a target or of a copy: what it held without any patch, what was put there last."""

    slot: Slot
    original: object
    placed: object
    targets: set[Target] = field(default_factory=set)

    @property
    def is_disturbed(self) -> bool:
        """Other code has set the slot since."""
        return self.slot.read() is not self.placed

    def update(self) -> None:
        """Put what the targets hold into the slot, unless other code has set it since."""
        exchange: dict[int, object] = {}
        for target in self.targets:
            exchange.update(_exchange(target.held, target.content.value))
        value = swap(self.original, exchange)
        if value is not self.placed and not self.is_disturbed:
            self.slot.write(value)
            self.placed = value


class Patcher:
    """Owner of a set of patches; the result does not depend on when they or the modules came.

    A patch whose module is not imported yet waits for it. Copies of a patched object are followed
    in the target's top-level package, in `packages`, in MindSpeed and in the user's own code.
    """

    def __init__(self, packages: Collection[str] = ()) -> None:
        self._packages = frozenset(packages)
        self._entries: list[Entry] = []
        self._count = 0
        self._targets: dict[object, Target] = {}
        self._bindings: dict[object, _Binding] = {}
        self._hook = ImportHook(self._on_import)

    def apply(self, owner: str, patches: Iterable[Patch], level: int = 0) -> None:
        """Apply all `patches` or, with a PatchError, none of them.

        Wraps of one target stack by level, then by owner.
        """
        self.apply_all([(owner, patches, level)])

    def apply_all(self, owned: Iterable[tuple[str, Iterable[Patch], int]]) -> None:
        """Apply the patches of several owners with their levels, all or none, by one search."""
        asked = []
        for owner, patches, level in owned:
            for patch in patches:
                self._count += 1
                asked.append(Entry(owner, level, patch, self._count))
        entries = [*self._entries, *asked]
        for entry in asked:
            _check_module(entry)
            _check_together([each for each in entries if each.patch.target == entry.patch.target])
        self._settle(entries)

    def revert(self, owner: str | None = None) -> None:
        """Revert the patches of `owner`, or all, and leave everything as it was before."""
        self.revert_all({each.owner for each in self._entries} if owner is None else {owner})

    def revert_all(self, owners: Collection[str]) -> None:
        """Revert the patches of several owners by one search."""
        self._settle([each for each in self._entries if each.owner not in owners])

    def original(self, target: str) -> object | None:
        """Return the unpatched object of a patched "pkg.module:Qual.name", or None."""
        found = (each.target for each in self._entries if each.patch.target == target)
        return next((unwrap(each.original) for each in found if each), None)

    def report(self) -> list[PatchRecord]:
        """List every patch, by level and owner: applied, or waiting for its module."""
        followed: Counter[Target | None] = Counter(
            t for b in self._bindings.values() if not b.is_disturbed for t in b.targets
        )
        return [
            PatchRecord(
                owner=entry.owner,
                level=entry.level,
                kind=entry.patch.kind,
                target=entry.patch.target,
                state="applied" if entry.target else "waiting",
                copies=max(0, followed[entry.target] - 1),  # one is the target's own slot
                why=entry.patch.why,
            )
            for entry in sorted(self._entries, key=lambda each: each.order[1:])
        ]

    def _settle(self, entries: list[Entry]) -> None:
        """Apply what can be applied of `entries`, wait for the rest."""
        try:
            self._update(_ready(entries))
            while any(each.is_due for each in entries):  # a factory imported its module
                self._update(_ready(entries))
        except Exception:
            self._update([each for each in self._entries if each.target])
            raise
        self._entries = entries
        self._hook.expect({name for each in entries if (name := each.awaits())})

    def _on_import(self, module: str) -> None:
        """Apply the patches of a module whose import is complete, before its importer sees it."""
        try:
            self._settle(self._entries)
        except PatchError:
            sys.modules.pop(module, None)  # the next import fails again instead of going unpatched
            raise
        logger.debug("patched %s on import", module)

    def _update(self, entries: Iterable[Entry]) -> None:
        """Make the code as `entries` specify, or raise and leave it as it was."""
        try:
            groups: dict[Target, list[Entry]] = {}
            for entry in entries:
                groups.setdefault(entry.target or self._locate(entry), []).append(entry)
            for together in groups.values():
                _check_together(together)
            changed = [t for t in self._targets.values() if t.entries != groups.get(t, [])]
            for target in changed:
                binding = self._bindings.get(target.slot.identity)
                if target in groups and binding and binding.is_disturbed:
                    raise groups[target][-1].error("other code has changed it since")
            if changed:
                self._change(changed, groups)
        finally:
            self._targets = {key: t for key, t in self._targets.items() if t.entries}

    def _locate(self, entry: Entry) -> Target:
        container: Any = sys.modules[entry.patch.module]
        *path, name = entry.patch.target.partition(":")[2].split(".")
        for part in path:
            inner = getattr(container, part, MISSING)
            if inner is MISSING:
                raise entry.error(_no_such(container, part))
            # Members of a patched class are those of the original class, whichever came first.
            patched = (t for t in self._targets.values() if t.follows and t.content.value is inner)
            container = next((target.original for target in patched), inner)
        slot = slot_of(container, name)
        target = self._targets.get(slot.identity) or self._copied(slot, entry.patch.module)
        if target is None:
            target = self._targets[slot.identity] = Target.locate(entry, container, slot)
        elif entry.patch.kind == "add":
            raise entry.error("it exists already")
        return target

    def _copied(self, slot: Slot, module: str) -> Target | None:
        """Return the target that `slot` is a copy of: one object exported under two names."""
        held = id(slot.read())
        copied = (t for t in self._targets.values() if held in ids_of(t.content.value))
        return next((each for each in copied if each.accepts(slot, module)), None)

    def _change(self, changed: Collection[Target], groups: _Groups) -> None:
        search = Search(self._packages.union(each.module.partition(".")[0] for each in changed))
        # Before any factory runs, since what a factory keeps of the original is no copy.
        search.new_modules(_current_ids(each for each in changed if each.entries or not each.alone))
        built = self._build(changed, groups)
        while search.new_modules(_current_ids(changed)):  # which factories imported
            built = self._build(changed, groups)
        # Who holds a new value already holds it in its own right.
        shared = (
            c.value for t, c in built.items() if t.follows and c.last and not c.last.exclusive
        )
        search.all_modules({each for value in shared for each in ids_of(value)})
        for target in changed:
            self._bind(target.slot, target)
            for slot, module in search.holders(target.content.value):
                if target.accepts(slot, module) and not _defines(groups.get(target, ()), module):
                    self._bind(slot, target)
        for target, content in built.items():
            bystanders = target.content.bystanders
            if content.value is not target.content.value:
                bystanders = {slot.identity: slot for slot, _ in search.holders(content.value)}
            built[target] = content._replace(bystanders=bystanders)
        self._install(built)
        for target, entries in groups.items():
            self._targets[target.slot.identity] = target
            for entry in entries:
                entry.target = target

    def _build(self, changed: Collection[Target], groups: _Groups) -> dict[Target, Content]:
        """Build new contents, base classes first, and again what inherits from them."""
        targets = {*self._targets.values(), *changed}
        built: dict[Target, Content] = {}
        for target in sorted(targets, key=lambda each: each.depth):
            base = target.base(built)
            if target in changed or base is not target.content.base:
                entries = groups.get(target, [])
                built[target] = Content(target.build(entries, base), base, entries)
        _check_members({target: built.get(target, target.content) for target in targets})
        return built

    def _bind(self, slot: Slot, target: Target) -> None:
        """Let `slot`, which holds the target's current content, follow the target."""
        binding = self._bindings.get(slot.identity)
        if binding is None or binding.is_disturbed:
            held = slot.read()
            binding = self._bindings[slot.identity] = _Binding(slot, held, held)
        binding.original = swap(binding.original, _exchange(target.content.value, target.held))
        binding.targets.add(target)

    def _install(self, contents: Mapping[Target, Content]) -> None:
        """Set every slot that follows one of the targets, or none."""
        before = {target: target.content for target in contents}
        for target, content in contents.items():
            target.content = content
        try:
            for binding in list(self._bindings.values()):
                touched = binding.targets & contents.keys()
                if touched:
                    binding.update()
        except Exception as error:
            self._install(before)
            blamed = next((contents[each].entries or before[each].entries)[-1] for each in touched)
            raise blamed.error(f"it cannot be set: {error}") from error
        for binding in self._bindings.values():
            binding.targets = {target for target in binding.targets if target.entries}
        self._bindings = {key: each for key, each in self._bindings.items() if each.targets}


def _ready(entries: Collection[Entry]) -> list[Entry]:
    """Return the entries whose modules are imported, with their values loaded."""
    while True:
        ready = [each for each in entries if each.target or each.is_due]
        unloaded = [each for each in ready if each.value is MISSING]
        if not unloaded:
            return ready
        unloaded[0].load()  # which may import what other entries wait for


def _exchange(before: Any, after: Any) -> dict[int, object]:
    """Map the ids by which copies of `before` are known to what replaces them."""
    return {id(unwrap(before)): unwrap(after), id(before): after}


def _current_ids(targets: Iterable[Target]) -> set[int]:
    """Return the ids by which copies of what the targets hold are known."""
    return {each for t in targets if t.follows for each in ids_of(t.content.value)}


def _defines(entries: Collection[Entry], module: str) -> bool:
    """Return whether a module defines a replacement: it refers to the original to use it."""
    return any(each.patch.kind == "replace" and each.home == module for each in entries)


def _check_module(entry: Entry) -> None:
    """Refuse to wait for a module that an installed package does not have."""
    name = entry.patch.module
    if name in sys.modules or find_without_import(name) is not None:
        return
    package = regular_package(name)
    # A package that is absent, or that a stand-in answers for, may still come.
    if package is not None and not is_alias(package):
        raise entry.error(f"there is no module {name}")


def _check_together(entries: Collection[Entry]) -> None:
    """Refuse a second replacement of one target, and any patch of what another one adds."""
    first, *others = sorted(entries, key=lambda each: each.order)
    for other in others:
        if first.patch.kind == "add" or other.patch.kind == "add":
            raise other.error(f"{first.owner} adds it")
        if first.patch.kind == other.patch.kind == "replace":
            raise other.error(f"{first.owner} replaces it too, and only one can: use a wrap")


def _check_members(contents: Mapping[Target, Content]) -> None:
    """Refuse a patch inside a class that another owner replaces by an unrelated one."""
    replaced = {
        target.original: content.entries[0]
        for target, content in contents.items()
        if isinstance(target.original, type) and content.entries
        if not issubclass(content.value, target.original)
    }
    for target, content in contents.items():
        for entry in content.entries:
            by = replaced.get(target.slot.container) if target.in_class else None
            if by and by.owner != entry.owner:
                raise entry.error(
                    f"{by.owner} replaces the class by one that does not inherit from it"
                )


def _is_followed(value: Any, module: str) -> bool:
    """Return whether others that hold the same object hold a copy of what `module` defines.

    Constants, enum members and the like are shared by chance, and an object that another package
    defines (a torch function reached through a Megatron module) is held in its own right.
    """
    package = module.partition(".")[0]
    if isinstance(value, (Enum, ModuleType)):
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
    return found is not value  # not what its name refers to: made here, by a foreign decorator


def _no_such(container: Any, name: str) -> str:
    near = difflib.get_close_matches(name, dir(container), n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    return f"{getattr(container, '__name__', container)} has no {name}{hint}"
