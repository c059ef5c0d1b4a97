"""The patched places of one patcher: find them, build what stands there, change all or nothing."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mindspeed.patching.holders import Holders
from mindspeed.patching.places import is_alone, is_followed, look_up, place_of, unwrap
from mindspeed.patching.slots import MISSING, Slot
from mindspeed.patching.survey import Survey
from mindspeed.patching.target import Content, Entry, Target

_Groups = Mapping[Target, list[Entry]]


class Installation:
    """What is patched now; `packages` are searched for copies beside the patched one."""

    def __init__(self, packages: Collection[str] = ()) -> None:
        self._packages = frozenset(packages)
        self._targets: dict[object, Target] = {}
        self._holders = Holders()

    def update(self, entries: Iterable[Entry]) -> None:
        """Make the code as `entries` say, or raise and leave it as it was."""
        try:
            groups = self._group(entries)
            changed = [t for t in self._targets.values() if t.entries != groups.get(t, [])]
            for target in changed:
                if target.is_disturbed and target in groups:
                    raise groups[target][-1].error("somebody else has changed it since")
            if changed:
                self._change(changed, groups)
        finally:
            self._targets = {key: t for key, t in self._targets.items() if t.entries}

    def copies(self, target: Target) -> int:
        """Return how many copies of the target follow it."""
        return self._holders.count(target)

    def _group(self, entries: Iterable[Entry]) -> _Groups:
        groups: dict[Target, list[Entry]] = {}
        for entry in entries:
            groups.setdefault(entry.target or self._locate(entry), []).append(entry)
        for together in groups.values():
            check_together(together)
        return groups

    def _locate(self, entry: Entry) -> Target:
        container: Any = sys.modules[entry.patch.module]
        *path, name = entry.patch.path
        for part in path:
            inner = getattr(container, part, MISSING)
            if inner is MISSING:
                raise entry.error(_no_such(container, part))
            container = self._unpatched(inner)
        place = place_of(container, name)
        target = self._targets.get(place.identity) or self._copied(place, entry.patch.module)
        if target is None:
            target = self._targets[place.identity] = _new_target(entry, container, place)
        elif entry.patch.kind == "add":
            raise entry.error("it exists already")
        return target

    def _unpatched(self, value: Any) -> Any:
        """Members of a patched class are those of the original class, whichever came first."""
        originals = (t.original for t in self._targets.values() if t.follows and t.current is value)
        return next(originals, value)

    def _copied(self, place: Slot, module: str) -> Target | None:
        """Return the target that `place` is a copy of: one object exported under two names."""
        held = id(place.read())
        for target in self._targets.values():
            if held in target.held_ids() and target.accepts(place, module):
                return target
        return None

    def _change(self, changed: Collection[Target], groups: _Groups) -> None:
        survey = Survey(changed, groups, self._packages)
        survey.look()
        built = self._build(changed, groups)
        while survey.look_in_new_modules():
            built = self._build(changed, groups)
        survey.look_for_made(built)
        for place, target in survey.copies():
            self._holders.add(place, target)
        self._install({each: survey.with_bystanders(each, built[each]) for each in built})
        for target, entries in groups.items():
            self._targets[target.place.identity] = target
            for entry in entries:
                entry.target = target

    def _build(self, changed: Collection[Target], groups: _Groups) -> dict[Target, Content]:
        """Build new contents, base classes first, and again what inherits from them."""
        targets = {*self._targets.values(), *changed}
        built: dict[Target, Content] = {}
        for target in sorted(targets, key=_depth):
            base = self._base(target, built)
            if target in changed or base is not target.base:
                entries = groups.get(target, [])
                built[target] = Content(target.build(entries, base), base, entries)
        _check_members({target: built.get(target, target.content()) for target in targets})
        return built

    def _base(self, target: Target, built: Mapping[Target, Content]) -> Any:
        """Return the raw attribute that the target's patches start from."""
        if target.owned or target.original is MISSING or not target.in_class:
            return target.original
        parents = [place_of(cls, target.place.key) for cls in target.place.container.__mro__[1:]]
        by_place = {each.place.identity: content.value for each, content in built.items()}
        raw = (by_place.get(place.identity, place.read()) for place in parents)
        return next(each for each in raw if each is not MISSING)

    def _install(self, built: Mapping[Target, Content]) -> None:
        before = {target: target.content() for target in built}
        try:
            for target, content in built.items():
                last = content.entries or target.entries
                target.install(content)
            self._holders.rebind(built.keys())
        except Exception as error:
            for target, content in before.items():
                target.install(content)
            self._holders.rebind(built.keys())
            raise last[0].error(f"it cannot be set: {error}") from error


def check_together(entries: Sequence[Entry]) -> None:
    """Refuse a second replacement of one target, and any patch of what another one adds."""
    first, *others = sorted(entries, key=lambda each: each.order)
    for other in others:
        if first.patch.kind == "add" or other.patch.kind == "add":
            raise other.error(f"{first.owner} adds it")
        if first.patch.kind == other.patch.kind == "replace":
            raise other.error(f"{first.owner} replaces it too, and only one can: use a wrap")


def _new_target(entry: Entry, container: Any, place: Slot) -> Target:
    alone = is_alone(place)
    original = look_up(container, place.key)
    if original is MISSING and entry.patch.kind != "add":
        raise entry.error(_no_such(container, place.key))
    if original is not MISSING and entry.patch.kind == "add":
        raise entry.error("it exists already")
    owned = place.read() is not MISSING
    follows = owned and is_followed(unwrap(original), entry.patch.module)
    module = entry.patch.module
    return Target(module, place, original, owned, follows, alone, original, original)


def _no_such(container: Any, name: str) -> str:
    near = difflib.get_close_matches(name, dir(container), n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    return f"{getattr(container, '__name__', container)} has no {name}{hint}"


def _depth(target: Target) -> int:
    return len(target.place.container.__mro__) if target.in_class else 0


def _check_members(contents: Mapping[Target, Content]) -> None:
    """Refuse a patch inside a class that somebody else replaces by an unrelated one."""
    replaced = {
        target.original: content.entries[0]
        for target, content in contents.items()
        if isinstance(target.original, type) and content.entries
        if not issubclass(content.value, target.original)
    }
    for target, content in contents.items():
        for entry in content.entries:
            by = replaced.get(target.place.container) if target.in_class else None
            if by and by.owner != entry.owner:
                raise entry.error(
                    f"{by.owner} replaces the class by one that does not inherit from it"
                )
