"""Finds every feature in this package and checks that their declarations fit together."""

import functools
import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterable, Iterator
from types import ModuleType

import mindspeed.features
from mindspeed.config import did_you_mean
from mindspeed.features.base import Feature, Level
from mindspeed.features.options import CommonOptions, combine


class Registry:
    """The known features, lowest level first and what a feature requires before it."""

    def __init__(self, features: Iterable[Feature]) -> None:
        found = list(features)
        _check(found)
        self._features = {feature.name: feature for feature in _in_order(found)}
        self.options_class: type[CommonOptions] = combine(self._features.values())

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._features.values())

    def __getitem__(self, name: str) -> Feature:
        return self._features[name]

    def conflict(self, one: Feature, other: Feature) -> str | None:
        """Return why two features exclude each other, whichever of them says so."""
        return one.conflicts.get(other.name) or other.conflicts.get(one.name)


@functools.cache
def registry() -> Registry:
    """Return the features of this package."""
    return Registry(discover(mindspeed.features))


def discover(package: ModuleType) -> Iterator[Feature]:
    """Create every feature that a module of the package declares."""
    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        for value in vars(module).values():
            if _is_declared_here(value, module):
                yield value()


def _is_declared_here(value: object, module: ModuleType) -> bool:
    declared = isinstance(value, type) and issubclass(value, Feature) and hasattr(value, "name")
    return declared and value.__module__ == module.__name__


def _in_order(features: list[Feature]) -> list[Feature]:
    """Sort by level, then by how many features stand below, then by name."""
    by_name = {feature.name: feature for feature in features}

    def depth(feature: Feature) -> int:
        return max((1 + depth(by_name[name]) for name in feature.requires), default=0)

    return sorted(features, key=lambda feature: (feature.level, depth(feature), feature.name))


def _check(features: list[Feature]) -> None:
    names = [feature.name for feature in features]
    fields = [field for feature in features for field in feature.fields]
    for kind, words in (("feature", names), ("option", [*CommonOptions.model_fields, *fields])):
        twice = [word for word, count in Counter(words).items() if count > 1]
        if twice:
            raise RuntimeError(f"{kind} {twice[0]} is declared twice")
    for feature in features:
        _check_one(feature, names)


def _check_one(feature: Feature, names: list[str]) -> None:
    for name in (*feature.requires, *feature.conflicts):
        if name not in names:
            hint = did_you_mean(name, names)
            raise RuntimeError(f"feature {feature.name} names the unknown feature {name}; {hint}")
    if feature.enabled_by is None and feature.level is not Level.COMPAT:
        raise RuntimeError(
            f"feature {feature.name} is always on, which is for level 0 only: set enabled_by"
        )
    if feature.enabled_by is not None and feature.enabled_by not in feature.fields:
        raise RuntimeError(f"feature {feature.name} has no option {feature.enabled_by}")
