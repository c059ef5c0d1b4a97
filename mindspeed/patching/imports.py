"""Imports: find modules without running them, hook their completion, serve them under aliases."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import sys
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


def find_without_import(name: str, skip: Container[object] = ()) -> ModuleSpec | None:
    """Return the spec that `import name` would use, asking every finder that is not in `skip`."""
    path, parent = None, name.rpartition(".")[0]
    if parent in sys.modules:
        path = getattr(sys.modules[parent], "__path__", None)
    elif parent:
        spec = find_without_import(parent, skip)
        path = spec.submodule_search_locations if spec else None
    if parent and path is None:
        return None
    return _ask((each for each in sys.meta_path if each not in skip), name, path)


def _ask(finders: Iterable[object], name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the first spec that one of `finders` has for `name`."""
    for finder in finders:
        find_spec = getattr(finder, "find_spec", None)
        try:
            spec = find_spec(name, path) if find_spec else None
        except KeyError:
            # A directory without `__init__.py` below a package that is not imported yet: its path
            # is looked up in its parent.
            spec = ModuleSpec(name, None, is_package=True)
            folders = [Path(each, name.rpartition(".")[2]) for each in path or ()]
            spec.submodule_search_locations = [str(each) for each in folders if each.is_dir()]
        if isinstance(spec, ModuleSpec):
            return spec
    return None


def is_installed(name: str, skip: Container[object] = ()) -> bool:
    """Return whether there is code under `name`; a directory without Python files is none."""
    if name in sys.modules:
        return True
    spec = find_without_import(name, skip)
    if spec is None:
        return False
    return not _is_namespace(spec) or any(pkgutil.iter_modules(spec.submodule_search_locations))


def regular_package(name: str) -> ModuleSpec | None:
    """Return the outermost package of `name` that is no namespace, or None if it is missing."""
    specs = map(find_without_import, itertools.accumulate(name.split("."), "{}.{}".format))
    return next((each for each in specs if each is None or not _is_namespace(each)), None)


def _is_namespace(spec: ModuleSpec) -> bool:
    return spec.origin is None and spec.submodule_search_locations is not None


class _WatchedSpec(ModuleSpec):
    """A spec that calls back when its module is complete.

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
                self._watch(getattr(sys.modules[name], "__spec__", None))  # import under way

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find an awaited module as the other finders do, and watch its import."""
        if fullname not in self._awaited:
            return None
        spec = _ask(sys.meta_path[sys.meta_path.index(self) + 1 :], fullname, path)
        self._watch(spec)
        return spec

    def _watch(self, spec: ModuleSpec | None) -> None:
        if type(spec) is ModuleSpec:
            vars(spec)["_callbacks"] = {}  # in the order of the first request
            spec.__class__ = _WatchedSpec
        if isinstance(spec, _WatchedSpec) and "_callbacks" in vars(spec):
            vars(spec)["_callbacks"][self._arrived] = None


def is_imported(name: str) -> bool:
    """Return whether the module is loaded and its body has run to its end."""
    if sys.modules.get(name) is None:
        return False
    spec = getattr(sys.modules[name], "__spec__", None)
    has_run = isinstance(spec, _WatchedSpec) and "_callbacks" not in vars(spec)
    return has_run or not getattr(spec, "_initializing", False)


class Aliases(MetaPathFinder):
    """Names that are served by another package because nothing real is installed under them."""

    def __init__(self) -> None:
        self._served: dict[str, str] = {}

    def serve(self, name: str, real: str, without: str | None = None) -> bool:
        """Answer `import name[.sub]` with `real[.sub]`; False if `name` exists by itself.

        A module that exists and cannot work `without` some package is served where that is absent.
        """
        if name in self._served:
            return self._served[name] == real
        exists = is_installed(name, skip=(self,))
        wanted = not exists if without is None else exists and not is_installed(without)
        if wanted:
            self._served[name] = real
        if wanted and self not in sys.meta_path:
            # Before the search for files, which would load a second copy from the real package's
            # path; behind the import hook, which must see every module first.
            finders: list[object] = [*sys.meta_path, PathFinder]
            sys.meta_path.insert(finders.index(PathFinder), self)
        return wanted

    def revert(self) -> None:
        """Remove every alias and the modules imported through them."""
        for name in self._served:
            parent, _, child = name.rpartition(".")
            namespace = vars(sys.modules[parent]) if parent in sys.modules else {}
            if child in namespace and namespace[child] is sys.modules.get(name):
                del namespace[child]
            for loaded in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
                del sys.modules[loaded]
        self._served.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that leads to the real module, or None if there is none."""
        for name, real in self._served.items():
            if f"{fullname}.".startswith(f"{name}."):
                real += fullname.removeprefix(name)
                if found := find_without_import(real):
                    spec = ModuleSpec(fullname, _AliasLoader(real), origin=found.origin)
                    spec.submodule_search_locations = found.submodule_search_locations
                    return spec
        return None


def is_alias(spec: ModuleSpec) -> bool:
    """Return whether another package is served under this name."""
    return isinstance(spec.loader, _AliasLoader)


class _AliasLoader(Loader):
    """Loads the real module, and keeps it unchanged."""

    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system put the alias's spec on the module that already has its own.
        module.__spec__ = self._spec
