"""Finds the features of every group folder, checks them and combines their options."""

import functools
import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Literal, cast

from pydantic import create_model

import mindspeed.features
from mindspeed import config
from mindspeed.config import did_you_mean
from mindspeed.features.base import Feature


class CommonOptions(config.Options):
    """What belongs to no single feature."""

    optimization_level: Literal[0, 1, 2] = 2
    """Which layers of features may be used. 0: Megatron runs on this device; 1: also the fused
    operators; 2: also the acceleration algorithms."""


def combine(features: Iterable[Feature]) -> type[CommonOptions]:
    """Make one class that has the common options and those of every feature."""
    classes = [feature.Options for feature in features if feature.Options is not None]
    # The last base comes first in the order of fields, which is the order of flags in the help.
    bases = cast(tuple[type[CommonOptions], ...], (*reversed(classes), CommonOptions))
    return create_model("MindSpeedOptions", __base__=bases)


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
    """Create every feature that a module in a folder of the package declares."""
    groups = [found.name for found in pkgutil.iter_modules(package.__path__) if found.ispkg]
    for group in groups:
        yield from _declared_in(importlib.import_module(f"{package.__name__}.{group}"))


def _declared_in(group: ModuleType) -> Iterator[Feature]:
    for found in pkgutil.walk_packages(group.__path__, f"{group.__name__}."):
        module = importlib.import_module(found.name)
        for value in vars(module).values():
            if _is_declared_here(value, module):
                yield value()


def _is_declared_here(value: object, module: ModuleType) -> bool:
    declared = isinstance(value, type) and issubclass(value, Feature) and hasattr(value, "name")
    return declared and value.__module__ == module.__name__


def _in_order(features: list[Feature]) -> list[Feature]:
    """Sort by level, then by the depth of its requirements, then by name."""
    by_name = {feature.name: feature for feature in features}

    def depth(feature: Feature) -> int:
        return max((1 + depth(by_name[name]) for name in feature.requires), default=0)

    return sorted(features, key=lambda feature: (feature.level, depth(feature), feature.name))


def _check(features: list[Feature]) -> None:
    names = [feature.name for feature in features]
    classes = [feature.Options for feature in features if feature.Options is not None]
    fields = [name for each in classes for name in each.accepted_names()]
    for kind, declared in (("feature", names), ("option", [*CommonOptions.model_fields, *fields])):
        twice = [name for name, count in Counter(declared).items() if count > 1]
        if twice:
            raise RuntimeError(f"{kind} {twice[0]} is declared twice")
    for feature in features:
        _check_one(feature, names)


def _check_one(feature: Feature, names: list[str]) -> None:
    for name in (*feature.requires, *feature.conflicts):
        if name not in names:
            hint = did_you_mean(name, names)
            raise RuntimeError(f"feature {feature.name} names the unknown feature {name}; {hint}")
    if feature.enabled_by is None and not feature.megatron_flags:
        raise RuntimeError(
            f"feature {feature.name} has no switch: set enabled_by or megatron_flags, or make it "
            "an entry of mindspeed/compat/table.py"
        )
    if feature.enabled_by is not None and feature.enabled_by not in feature.fields:
        raise RuntimeError(f"feature {feature.name} has no option {feature.enabled_by}")
