"""A patch, its state in a patcher, its report, and the error when it cannot be applied."""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.patching.imports import is_imported
from mindspeed.patching.signatures import mismatch
from mindspeed.patching.slots import MISSING, Slot, has_no_copy, look_up, slot_of, unwrap

if TYPE_CHECKING:
    from mindspeed.patching.patcher import Target

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

    @property
    def path(self) -> list[str]:
        """The attribute names that lead from the module to `target`."""
        return self.target.partition(":")[2].split(".")


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


def split_reference(text: object) -> tuple[str, str] | None:
    """Split "pkg.module:Qual.name" in two; None for anything else."""
    match = _REFERENCE.fullmatch(text) if isinstance(text, str) else None
    return (match[1], match[2]) if match else None


class PatchError(RuntimeError):
    """A patch that cannot be applied; names its owner, its target and the version found."""


@dataclass(eq=False)
class Entry:
    """A patch as its owner asked for it; its value and target are known when its module is."""

    owner: str
    level: int
    patch: Patch
    number: int
    value: Any = MISSING
    exclusive: bool = False  # nothing else holds the value
    target: Target | None = None

    @property
    def order(self) -> tuple[bool, int, str, int]:
        """Sort replacements first, then wraps by level and owner."""
        return self.patch.kind == "wrap", self.level, self.owner, self.number

    @property
    def home(self) -> str:
        """The module that defines the value."""
        reference = split_reference(self.patch.value)
        return reference[0] if reference else str(getattr(self.value, "__module__", ""))

    def is_shared(self, kind: Kind) -> bool:
        """Return whether this is a `kind` whose value others may hold too."""
        return self.patch.kind == kind and not self.exclusive

    def error(self, reason: str) -> PatchError:
        """Build an error that names this patch and the version of what it patches."""
        patch, version = self.patch, package_version(self.patch.module)
        text = f"cannot {patch.kind} {patch.target} ({version}): {reason}"
        return PatchError(f"{self.owner}: {text}")

    def awaits(self) -> str | None:
        """Return the module whose import has to end before this patch can be applied."""
        if not is_imported(self.patch.module):
            return self.patch.module
        module, name = split_reference(self.patch.value) or ("", "")
        is_coming = module in sys.modules and not is_imported(module)
        is_there = is_coming and hasattr(sys.modules[module], name.partition(".")[0])
        return module if is_coming and not is_there else None

    @property
    def is_due(self) -> bool:
        """The modules of this patch are imported, and it is not applied yet."""
        return self.target is None and self.awaits() is None

    def load(self) -> None:
        """Import the value if it was given by name."""
        reference = split_reference(self.patch.value)
        if reference is None:
            self.value = self._as_given(self.patch.value)
            return
        *path, last = reference[1].split(".")
        try:
            container: Any = importlib.import_module(reference[0])
            for name in path:
                container = getattr(container, name)
        except (ImportError, AttributeError) as error:
            raise self.error(f"cannot load {self.patch.value}: {error}") from error
        self.exclusive = has_no_copy(slot_of(container, last))
        self.value = self._as_given(look_up(container, last))
        if self.value is MISSING:
            raise self.error(f"cannot load {self.patch.value}: there is no {last}")

    def _as_given(self, raw: Any) -> Any:
        # An addition keeps its own kind; other values take that of the original (rewrap).
        return raw if self.patch.kind == "add" else unwrap(raw)

    def make(self, before: Any, original: Any) -> Any:
        """Return what this patch makes of `before`; `original` is the unpatched object."""
        if self.patch.kind == "add":
            return self.value
        wraps = self.patch.kind == "wrap"
        new = self._wrapped(before) if wraps else self.value
        reason = mismatch(original, new, forwards=wraps)
        if reason:
            raise self.error(reason)
        return new

    def _wrapped(self, before: Any) -> Any:
        try:
            slot = Slot([self.value(before)], 0)
        except Exception as error:
            raise self.error(f"its factory failed: {error!r}") from error
        self.exclusive = has_no_copy(slot)
        return unwrap(slot.read())


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
