"""Before targets change: who holds what stands there now, and who holds what comes there."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mindspeed.patching.places import unwrap
from mindspeed.patching.scope import interested_modules
from mindspeed.patching.search import Find, find_places
from mindspeed.patching.slots import Slot
from mindspeed.patching.target import Content, Entry, Target


class Survey:
    """The places that matter when the patches in `groups` change `targets`."""

    def __init__(
        self,
        targets: Collection[Target],
        groups: Mapping[Target, list[Entry]],
        packages: Collection[str],
    ) -> None:
        self._targets = [target for target in targets if target.follows]
        self._groups = groups
        self._packages = {each.module.partition(".")[0] for each in targets}.union(packages)
        self._modules = set(sys.modules)
        self._finds: dict[int, list[Find]] = defaultdict(list)
        entries = [entry for target in self._targets for entry in groups.get(target, ())]
        self._coming = {id(each.value) for each in entries if each.is_shared("replace")}

    def look(self) -> None:
        """Search before any factory runs: what it keeps of the original for itself is no copy."""
        held = [each.held_ids() for each in self._targets if each.entries or not each.alone]
        self._search(self._coming.union(*held), self._modules)

    def look_in_new_modules(self) -> bool:
        """Search what the factories imported, if anything."""
        fresh = set(sys.modules) - self._modules
        self._modules |= fresh
        self._search(self._coming.union(*(each.held_ids() for each in self._targets)), fresh)
        return bool(fresh)

    def look_for_made(self, contents: Mapping[Target, Content]) -> None:
        """Search for what factories returned, unless it is certainly new."""
        lasts = {target: content.last for target, content in contents.items() if target.follows}
        shared = [target for target, last in lasts.items() if last and last.is_shared("wrap")]
        self._search({id(unwrap(contents[each].value)) for each in shared}, self._modules)

    def copies(self) -> Iterator[tuple[Slot, Target]]:
        """Yield the places that hold a copy of a target."""
        for target in self._targets:
            for place, module, _ in self._holders(target.current):
                if target.accepts(place, module) and not self._builds_on(target, module):
                    yield place, target

    def with_bystanders(self, target: Target, content: Content) -> Content:
        """Note on `content` which places hold its value without being copies of the target."""
        if not content.entries or content.value is target.current:
            return content._replace(bystanders=target.bystanders)
        places = [place for place, _, _ in self._holders(content.value)]
        return content._replace(bystanders={place.identity: place for place in places})

    def _builds_on(self, target: Target, module: str) -> bool:
        """The module that defines a replacement refers to the original in order to use it."""
        entries = self._groups.get(target, ())
        return any(each.patch.kind == "replace" and each.home == module for each in entries)

    def _holders(self, value: Any) -> list[Find]:
        return [find for each in {id(value), id(unwrap(value))} for find in self._finds[each]]

    def _search(self, wanted: Collection[int], names: Collection[str]) -> None:
        if wanted and names:
            modules = interested_modules(self._packages)
            roots = {name: module for name, module in modules.items() if name in names}
            for find in find_places(wanted, roots, modules):
                for each in find.found:
                    self._finds[each].append(find)
