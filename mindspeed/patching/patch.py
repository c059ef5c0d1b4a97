"""What a patch is, what a report says of it, and the error when it cannot be applied."""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

Kind = Literal["replace", "wrap", "add"]

_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_REFERENCE = re.compile(f"({_NAME}):({_NAME})")


@dataclass(frozen=True)
class Patch:
    """One change to other people's code: `target` is "pkg.module:Qual.name".

    `value` is the new object, or the wrap factory (it receives the original and returns the new
    callable). A string that reads "pkg.module:name" is imported when the patch is applied.
    """

    kind: Kind
    target: str
    value: object
    why: str = ""

    def __post_init__(self) -> None:
        if split_reference(self.target) is None:
            raise ValueError(f"target {self.target!r} is not of the form 'pkg.module:Qual.name'")
        if self.kind == "wrap" and not (callable(self.value) or split_reference(self.value)):
            raise ValueError(
                f"the factory of a wrap of {self.target} is {self.value!r}: "
                "give a callable or a 'pkg.module:name' string"
            )

    @classmethod
    def replace(cls, target: str, value: object, why: str = "") -> Patch:
        """Put `value` in the place of `target`; one owner only."""
        return cls("replace", target, value, why)

    @classmethod
    def wrap(cls, target: str, factory: object, why: str = "") -> Patch:
        """Put `factory(original)` in the place of `target`; wraps of many owners stack."""
        return cls("wrap", target, factory, why)

    @classmethod
    def add(cls, target: str, value: object, why: str = "") -> Patch:
        """Give `target`, which must not exist yet, the value `value`."""
        return cls("add", target, value, why)

    @property
    def module(self) -> str:
        """The module that `target` lives in."""
        return self.target.partition(":")[0]


@dataclass(frozen=True)
class Effect:
    """A change that is not a patch: entered when its owner goes on, left when it goes off."""

    what: str
    """One phrase for the report."""
    context: AbstractContextManager[object]


@dataclass(frozen=True)
class PatchRecord:
    """What became of one patch: who asked for it, whether it is on, how many copies it reached."""

    owner: str
    level: int
    kind: Kind
    target: str
    state: Literal["applied", "waiting"]
    copies: int
    why: str


class PatchError(RuntimeError):
    """A patch that cannot be applied; names its owner, its target and the version found."""


def split_reference(text: object) -> tuple[str, str] | None:
    """Split "pkg.module:Qual.name" in two; None for anything else."""
    match = _REFERENCE.fullmatch(text) if isinstance(text, str) else None
    return (match[1], match[2]) if match else None


def package_version(module: str) -> str:
    """Name the package that `module` belongs to, with its version."""
    top = module.partition(".")[0]
    name = "megatron.core" if top == "megatron" else top  # megatron is a namespace without one
    declared = getattr(sys.modules.get(name), "__version__", None)
    if declared:
        return f"{name} {declared}"
    for distribution in metadata.packages_distributions().get(top, ()):  # slow: reads every file
        return f"{distribution} {metadata.version(distribution)}"
    return f"{top}, version unknown"
