"""One place that is patched: what stood there, who changes it, and what stands there now."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

from mindspeed.patching.errors import PatchError, patch_error
from mindspeed.patching.patch import Patch, split_reference
from mindspeed.patching.places import is_alone, look_up, place_of, rewrap, unwrap
from mindspeed.patching.signatures import mismatch
from mindspeed.patching.slots import MISSING, ClassAttribute, Slot


@dataclass(eq=False)
class Entry:
    """A patch as its owner asked for it; its value and target are known when its module is."""

    owner: str
    level: int
    patch: Patch
    number: int
    value: Any = MISSING
    value_is_alone: bool = False
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

    def error(self, reason: str) -> PatchError:
        """Build an error that names this patch."""
        return patch_error(self.owner, self.patch, reason)

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
        self.value_is_alone = is_alone(place_of(container, last))
        self.value = self._as_given(look_up(container, last))
        if self.value is MISSING:
            raise self.error(f"cannot load {self.patch.value}: there is no {last}")

    def _as_given(self, raw: Any) -> Any:
        # An addition keeps its own kind; other values become what stood there (rewrap).
        return raw if self.patch.kind == "add" else unwrap(raw)

    def make(self, before: Any, original: Any) -> Any:
        """Return what this patch puts in the place of `before`; `original` is the unpatched one."""
        if self.patch.kind == "add":
            return self.value
        wraps = self.patch.kind == "wrap"
        try:
            new = unwrap(self.value(before)) if wraps else self.value
        except Exception as error:
            raise self.error(f"its factory failed: {error!r}") from error
        reason = mismatch(original, new, forwards=wraps)
        if reason:
            raise self.error(reason)
        return new


class Content(NamedTuple):
    """What stands in a place (raw, MISSING for nothing), made by `entries` from `base`."""

    value: Any
    base: Any
    entries: list[Entry]


@dataclass(eq=False)
class Target:
    """A patched place; `original` is its raw content before any patch, MISSING for an addition."""

    module: str
    place: Slot
    original: Any
    owned: bool  # the place held the original itself, it did not come from a base class
    follows: bool  # copies of the original are rebound too
    alone: bool  # there was no copy when the target was found
    base: Any = MISSING
    current: Any = MISSING
    entries: list[Entry] = field(default_factory=list)
    bystanders: dict[object, Slot] = field(default_factory=dict)  # held the replacement before

    @property
    def in_class(self) -> bool:
        """The place is an attribute of a class."""
        return isinstance(self.place, ClassAttribute)

    def build(self, entries: Sequence[Entry], base: Any) -> Any:
        """Return what `entries` make of the raw attribute `base`."""
        if not entries:
            return self.original if self.owned else MISSING
        value = unwrap(base)
        for entry in sorted(entries, key=lambda each: each.order):
            value = entry.make(value, unwrap(base))
            is_method = self.in_class and isinstance(base, FunctionType)
            if is_method and not hasattr(type(value), "__get__"):
                raise entry.error(f"{value!r} would not receive self: give a function")
        return rewrap(value, base)

    def content(self) -> Content:
        """Return what stands in the place now."""
        return Content(self.place.read(), self.base, self.entries)

    def install(self, content: Content) -> None:
        """Put `content` in the place."""
        if content.value is not self.place.read():
            self.place.write(content.value)
        self.current = self.original if content.value is MISSING else content.value
        self.base, self.entries = content.base, content.entries

    def held_ids(self) -> list[int]:
        """Return the ids by which copies of the current content are known."""
        return [id(self.current), id(unwrap(self.current))] if self.follows else []

    def exchange(self) -> dict[int, object]:
        """Map the id of the original to what stands there now."""
        return _pairs(self.original, self.current)

    def restoration(self) -> dict[int, object]:
        """Map the id of what stands there now to the original."""
        return _pairs(self.current, self.original)

    def accepts(self, place: Slot, module: str) -> bool:
        """Tell whether a place in `module` that holds the current content is a copy of this one."""
        if not self.follows or place.identity == self.place.identity:
            return False
        last = max(self.entries, key=lambda each: each.order, default=None)
        if last is None or last.patch.kind == "wrap":
            return True
        # A replacement is also held, in its own right, where it comes from.
        same_package = module.partition(".")[0] == last.home.partition(".")[0]
        return not same_package and place.identity not in self.bystanders


def _pairs(before: Any, after: Any) -> dict[int, object]:
    return {id(before): after, id(unwrap(before)): unwrap(after)}
