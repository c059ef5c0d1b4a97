"""Let one module tree answer under a second name: the same module objects, imported on demand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from mindspeed.patching.finding import find_without_import, is_installed


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
        if not wanted:
            return False
        self._served[name] = real
        if self not in sys.meta_path:
            # Before the search for files, which would load a second copy from the real package's
            # path; behind the import hook, which must see every module first.
            finders: list[object] = [*sys.meta_path, PathFinder]
            sys.meta_path.insert(finders.index(PathFinder), self)
        return True

    def revert(self) -> None:
        """Forget every alias and the modules imported through them."""
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
        real = self._real_name(fullname)
        found = find_without_import(real) if real else None
        if real is None or found is None:
            return None
        spec = ModuleSpec(fullname, _AliasLoader(real), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def _real_name(self, fullname: str) -> str | None:
        for name, real in self._served.items():
            if f"{fullname}.".startswith(f"{name}."):
                return real + fullname[len(name) :]
        return None


def is_alias(spec: ModuleSpec) -> bool:
    """Tell whether another package answers under this name."""
    return isinstance(spec.loader, _AliasLoader)


class _AliasLoader(Loader):
    """Hands out the real module, and keeps it unchanged."""

    def __init__(self, real: str) -> None:
        self._real = real
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system put the alias's spec on the module that already has its own.
        module.__spec__ = self._spec
