"""Apply patches to other people's code, revert them, and report what is patched."""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

from mindspeed.patching.copies import Copies, Survey
from mindspeed.patching.imports import ImportHook, find_without_import, is_alias, regular_package
from mindspeed.patching.patch import Entry, Patch, PatchError, PatchRecord
from mindspeed.patching.slots import (
    MISSING,
    ClassAttribute,
    Slot,
    has_no_copy,
    look_up,
    rewrap,
    slot_of,
    unwrap,
)

logger = logging.getLogger(__name__)


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
    """A patched slot; `original` is its raw content before any patch, MISSING for an addition."""

    module: str
    slot: Slot
    original: Any
    owned: bool  # the slot held the original itself, it did not come from a base class
    follows: bool  # copies of the original are rebound too
    alone: bool  # there was no copy when the target was found
    content: Content

    @classmethod
    def locate(cls, entry: Entry, container: Any, slot: Slot) -> Target:
        """Describe a slot that is not patched yet."""
        alone, original = has_no_copy(slot), look_up(container, slot.key)
        if original is MISSING and entry.patch.kind != "add":
            raise entry.error(_no_such(container, slot.key))
        if original is not MISSING and entry.patch.kind == "add":
            raise entry.error("it exists already")
        owned, module = slot.read() is not MISSING, entry.patch.module
        follows = owned and _is_followed(unwrap(original), module)
        content = Content(original, original, [])
        return cls(module, slot, original, owned, follows, alone, content)

    @property
    def entries(self) -> list[Entry]:
        """The patches in force."""
        return self.content.entries

    @property
    def current(self) -> Any:
        """What the slot holds unless other code has set it; the original without any patch."""
        return self.original if self.content.value is MISSING else self.content.value

    @property
    def in_class(self) -> bool:
        """The slot is an attribute of a class."""
        return isinstance(self.slot, ClassAttribute)

    @property
    def is_disturbed(self) -> bool:
        """Other code has set the slot after our patch."""
        return bool(self.entries) and self.slot.read() is not self.current

    def build(self, entries: Sequence[Entry], base: Any) -> Any:
        """Return what `entries` make of the raw attribute `base`."""
        if not entries:
            return self.original if self.owned else MISSING
        value = unwrap(base)
        for entry in sorted(entries, key=lambda each: each.order):
            value = entry.make(value, unwrap(base))
            is_method = self.in_class and isinstance(base, FunctionType)
            if is_method and not hasattr(type(value), "__get__"):
                raise entry.error(f"{value!r} would not receive self: give a function")
        return rewrap(value, base)

    def install(self, content: Content) -> None:
        """Set the slot to `content`, unless other code has set it since."""
        if content.value is not self.slot.read() and not self.is_disturbed:
            self.slot.write(content.value)
        self.content = content

    def held_ids(self) -> list[int]:
        """Return the ids by which copies of the current content are known."""
        return [id(self.current), id(unwrap(self.current))] if self.follows else []

    @staticmethod
    def exchange(before: Any, after: Any) -> dict[int, object]:
        """Map the ids by which `before` is known to `after`."""
        return {id(before): after, id(unwrap(before)): unwrap(after)}

    def accepts(self, slot: Slot, module: str) -> bool:
        """Return whether a slot in `module` that holds the current content is a copy of it."""
        if not self.follows or slot.identity in (self.slot.identity, *self.content.bystanders):
            return False
        last = self.content.last
        if last is None or last.patch.kind == "wrap":
            return True
        # A replacement is also held, in its own right, by the package it comes from.
        return module.partition(".")[0] != last.home.partition(".")[0]


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
        self._copies = Copies()
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
        return [
            PatchRecord(
                owner=entry.owner,
                level=entry.level,
                kind=entry.patch.kind,
                target=entry.patch.target,
                state="applied" if entry.target else "waiting",
                copies=self._copies.count(entry.target) if entry.target else 0,
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
                if target.is_disturbed and target in groups:
                    raise groups[target][-1].error("other code has changed it since")
            if changed:
                self._change(changed, groups)
        finally:
            self._targets = {key: t for key, t in self._targets.items() if t.entries}

    def _locate(self, entry: Entry) -> Target:
        container: Any = sys.modules[entry.patch.module]
        *path, name = entry.patch.path
        for part in path:
            inner = getattr(container, part, MISSING)
            if inner is MISSING:
                raise entry.error(_no_such(container, part))
            # Members of a patched class are those of the original class, whichever came first.
            patched = (t for t in self._targets.values() if t.follows and t.current is inner)
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
        targets = (each for each in self._targets.values() if held in each.held_ids())
        return next((each for each in targets if each.accepts(slot, module)), None)

    def _change(self, changed: Collection[Target], groups: Mapping[Target, list[Entry]]) -> None:
        survey = Survey(changed, groups, self._packages)
        survey.search()
        built = self._build(changed, groups)
        while survey.search():
            built = self._build(changed, groups)
        survey.search_for_made(built)
        for slot, target in survey.copies():
            self._copies.add(slot, target)
        self._install({each: survey.with_bystanders(each, built[each]) for each in built})
        for target, entries in groups.items():
            self._targets[target.slot.identity] = target
            for entry in entries:
                entry.target = target

    def _build(
        self, changed: Collection[Target], groups: Mapping[Target, list[Entry]]
    ) -> dict[Target, Content]:
        """Build new contents, base classes first, and again what inherits from them."""
        targets = {*self._targets.values(), *changed}
        built: dict[Target, Content] = {}
        for target in sorted(targets, key=_depth):
            base = _base(target, built)
            if target in changed or base is not target.content.base:
                entries = groups.get(target, [])
                built[target] = Content(target.build(entries, base), base, entries)
        _check_members({target: built.get(target, target.content) for target in targets})
        return built

    def _install(self, built: Mapping[Target, Content]) -> None:
        before = {target: target.content for target in built}
        try:
            for target, content in built.items():
                last = content.entries or target.entries
                target.install(content)
            self._copies.rebind(built.keys())
        except Exception as error:
            for target, content in before.items():
                target.install(content)
            self._copies.rebind(built.keys())
            raise last[0].error(f"it cannot be set: {error}") from error


def _ready(entries: list[Entry]) -> list[Entry]:
    """Return the entries whose modules are imported, with their values loaded."""
    while True:
        ready = [each for each in entries if each.target or each.is_due]
        unloaded = [each for each in ready if each.value is MISSING]
        if not unloaded:
            return ready
        unloaded[0].load()  # which may import what other entries wait for


def _base(target: Target, built: Mapping[Target, Content]) -> Any:
    """Return the raw attribute that the target's patches start from."""
    if target.owned or target.original is MISSING or not target.in_class:
        return target.original
    parents = [slot_of(cls, target.slot.key) for cls in target.slot.container.__mro__[1:]]
    by_slot = {each.slot.identity: content.value for each, content in built.items()}
    raw = (by_slot.get(slot.identity, slot.read()) for slot in parents)
    return next(each for each in raw if each is not MISSING)


def _depth(target: Target) -> int:
    return len(target.slot.container.__mro__) if target.in_class else 0


def _check_module(entry: Entry) -> None:
    """Refuse to wait for a module that an installed package does not have."""
    name = entry.patch.module
    if name in sys.modules or find_without_import(name) is not None:
        return
    package = regular_package(name)
    # A package that is absent, or that a stand-in answers for, may still come.
    if package is not None and not is_alias(package):
        raise entry.error(f"there is no module {name}")


def _check_together(entries: Sequence[Entry]) -> None:
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
    return found is not value  # not what its name refers to: made here, by a foreign decorator


def _no_such(container: Any, name: str) -> str:
    near = difflib.get_close_matches(name, dir(container), n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    return f"{getattr(container, '__name__', container)} has no {name}{hint}"
