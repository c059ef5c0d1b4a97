"""Find modules without running their code."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Container, Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path


def find_without_import(name: str, skip: Container[object] = ()) -> ModuleSpec | None:
    """Return the spec that `import name` would use, asking every finder that is not in `skip`."""
    parent = name.rpartition(".")[0]
    path = _search_path(parent, skip) if parent else None
    if parent and path is None:
        return None
    return ask_finders([each for each in sys.meta_path if each not in skip], name, path)


def ask_finders(
    finders: Iterable[object], name: str, path: Sequence[str] | None
) -> ModuleSpec | None:
    """Return the first spec that one of `finders` has for `name`."""
    for finder in finders:
        find_spec = getattr(finder, "find_spec", None)
        try:
            spec = find_spec(name, path) if find_spec else None
        except KeyError:  # the path of a namespace package is looked up in its imported parent
            spec = _namespace(name, path or ())
        if isinstance(spec, ModuleSpec):
            return spec
    return None


def _namespace(name: str, path: Sequence[str]) -> ModuleSpec:
    """Describe a directory without `__init__.py` below a package that is not imported yet."""
    spec = ModuleSpec(name, None, is_package=True)
    places = [Path(each, name.rpartition(".")[2]) for each in path]
    spec.submodule_search_locations = [str(place) for place in places if place.is_dir()]
    return spec


def is_installed(name: str, skip: Container[object] = ()) -> bool:
    """Tell whether there is code under `name`; a directory without any Python file is none."""
    if name in sys.modules:
        return True
    spec = find_without_import(name, skip)
    if spec is None:
        return False
    return not _is_namespace(spec) or any(pkgutil.iter_modules(spec.submodule_search_locations))


def regular_package(name: str) -> ModuleSpec | None:
    """Return the outermost package of `name` that is no namespace, or None if it is missing."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = find_without_import(".".join(parts[:count]))
        if spec is None or not _is_namespace(spec):
            return spec
    return None


def _search_path(package: str, skip: Container[object]) -> Sequence[str] | None:
    """Return where the submodules of `package` lie; None if it is missing or has none."""
    loaded = sys.modules.get(package)
    if loaded is None:
        spec = find_without_import(package, skip)
        if spec is None:
            return None
        if not _is_namespace(spec) or isinstance(spec.submodule_search_locations, list):
            return spec.submodule_search_locations
        loaded = importlib.import_module(package)  # a namespace package runs no code
    return getattr(loaded, "__path__", None)


def _is_namespace(spec: ModuleSpec) -> bool:
    return spec.origin is None and spec.submodule_search_locations is not None
