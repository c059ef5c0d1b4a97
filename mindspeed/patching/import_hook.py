"""Call back right after the body of an awaited module has run, before its importer sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from mindspeed.patching.finding import ask_finders


class _WatchedSpec(ModuleSpec):
    """A spec that tells when its module is complete.

    The import system keeps `_initializing` true while the body of a module runs, also for imports
    under way when the watch begins, and clears it before any importer goes on. The loader stays as
    it was. Other threads that import the module wait until the callbacks have returned.
    """

    @property
    def _initializing(self) -> bool:
        return bool(vars(self).get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        callbacks = () if value else vars(self).pop("_callbacks")
        try:
            for callback in callbacks:
                callback(self.name)
        finally:
            vars(self)["_initializing"] = value
            if not value:
                self.__class__ = ModuleSpec  # type: ignore[assignment]


class ImportHook(MetaPathFinder):
    """Calls `arrived(name)` for every awaited module; is on sys.meta_path only while waiting."""

    def __init__(self, arrived: Callable[[str], None]) -> None:
        self._arrived = arrived
        self._awaited: Collection[str] = ()

    def expect(self, names: Collection[str]) -> None:
        """Wait for exactly these modules from now on."""
        self._awaited = names
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if names:
            sys.meta_path.insert(0, self)
        for name in names:
            if name in sys.modules:
                self._watch(_spec_of(sys.modules[name]))  # its import is under way

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find an awaited module as the other finders do, and watch its import."""
        if fullname not in self._awaited:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = ask_finders(behind, fullname, path)
        self._watch(spec)
        return spec

    def _watch(self, spec: ModuleSpec | None) -> None:
        if type(spec) is ModuleSpec:
            vars(spec)["_callbacks"] = {}  # in the order of the first request
            spec.__class__ = _WatchedSpec
        if isinstance(spec, _WatchedSpec) and "_callbacks" in vars(spec):
            vars(spec)["_callbacks"][self._arrived] = None


def is_imported(name: str) -> bool:
    """Tell whether the module is there and its body has run to its end."""
    if sys.modules.get(name) is None:
        return False
    spec = _spec_of(sys.modules[name])
    has_run = isinstance(spec, _WatchedSpec) and "_callbacks" not in vars(spec)
    return has_run or not getattr(spec, "_initializing", False)


def _spec_of(module: ModuleType) -> ModuleSpec | None:
    return getattr(module, "__spec__", None)
