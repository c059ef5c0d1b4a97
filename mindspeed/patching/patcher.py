"""Apply patches to somebody else's code, take them back, and tell what is patched."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable

from mindspeed.patching.aliases import is_alias
from mindspeed.patching.errors import PatchError
from mindspeed.patching.finding import find_without_import, regular_package
from mindspeed.patching.import_hook import ImportHook
from mindspeed.patching.installation import Installation, check_together
from mindspeed.patching.patch import Patch, PatchRecord
from mindspeed.patching.places import unwrap
from mindspeed.patching.slots import MISSING
from mindspeed.patching.target import Entry

logger = logging.getLogger(__name__)


class Patcher:
    """Owner of a set of patches; the result does not depend on when they or the modules came.

    A patch whose module is not imported yet waits for it. Copies of a patched object are followed
    in the target's top-level package, in `packages`, in MindSpeed and in the user's own code.
    """

    def __init__(self, packages: Collection[str] = ()) -> None:
        self._entries: list[Entry] = []
        self._count = 0
        self._installation = Installation(packages)
        self._hook = ImportHook(self._arrived)

    def apply(self, owner: str, patches: Iterable[Patch], level: int = 0) -> None:
        """Apply all `patches` or, with a PatchError, none of them.

        Wraps of one target stack by level, then by owner.
        """
        asked = []
        for patch in patches:
            self._count += 1
            asked.append(Entry(owner, level, patch, self._count))
        entries = [*self._entries, *asked]
        for entry in asked:
            _check_module(entry)
            check_together([each for each in entries if each.patch.target == entry.patch.target])
        self._settle(entries)

    def revert(self, owner: str | None = None) -> None:
        """Take back the patches of `owner`, or all, and leave everything as it was before."""
        self._settle([each for each in self._entries if owner not in (None, each.owner)])

    def original(self, target: str) -> object | None:
        """Return what stands at a patched "pkg.module:Qual.name" without any patch, or None."""
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
                copies=self._installation.copies(entry.target) if entry.target else 0,
                why=entry.patch.why,
            )
            for entry in sorted(self._entries, key=lambda each: each.order[1:])
        ]

    def _settle(self, entries: list[Entry]) -> None:
        """Apply what can be applied of `entries`, wait for the rest."""
        try:
            self._installation.update(_ready(entries))
            while any(each.is_due for each in entries):  # a factory imported its module
                self._installation.update(_ready(entries))
        except Exception:
            self._installation.update([each for each in self._entries if each.target])
            raise
        self._entries = entries
        self._hook.expect({name for each in entries if (name := each.awaits())})

    def _arrived(self, module: str) -> None:
        """The import of an awaited module is complete: apply its patches before anyone sees it."""
        try:
            self._settle(self._entries)
        except PatchError:
            sys.modules.pop(module, None)  # the next import fails again instead of going unpatched
            raise
        logger.debug("patched %s on import", module)


def _ready(entries: list[Entry]) -> list[Entry]:
    """Return the entries whose modules are imported, with their values loaded."""
    while True:
        ready = [each for each in entries if each.target or each.is_due]
        unloaded = [each for each in ready if each.value is MISSING]
        if not unloaded:
            return ready
        unloaded[0].load()  # which may import what other entries wait for


def _check_module(entry: Entry) -> None:
    """Refuse to wait for a module that an installed package does not have."""
    name = entry.patch.module
    if name in sys.modules or find_without_import(name) is not None:
        return
    package = regular_package(name)
    # A package that is absent, or that a stand-in answers for, may still come.
    if package is not None and not is_alias(package):
        raise entry.error(f"there is no module {name}")
