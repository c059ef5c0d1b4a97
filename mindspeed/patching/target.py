"""One place that is patched: what stood there, who changes it, and what stands there now."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

from mindspeed.patching.errors import PatchError, patch_error
from mindspeed.patching.import_hook import is_imported
from mindspeed.patching.patch import Kind, Patch, split_reference
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
    exclusive: bool = False  # nobody else holds what this patch puts in
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
        """Tell whether this is a `kind` whose value others may hold too."""
        return self.patch.kind == kind and not self.exclusive

    def error(self, reason: str) -> PatchError:
        """Build an error that names this patch."""
        return patch_error(self.owner, self.patch, reason)

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
        """Nothing stands in the way of this patch any more, but it is not applied yet."""
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
        self.exclusive = is_alone(place_of(container, last))
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
        new = self._wrapped(before) if wraps else self.value
        reason = mismatch(original, new, forwards=wraps)
        if reason:
            raise self.error(reason)
        return new

    def _wrapped(self, before: Any) -> Any:
        try:
            place = Slot([self.value(before)], 0)
        except Exception as error:
            raise self.error(f"its factory failed: {error!r}") from error
        self.exclusive = is_alone(place)
        return unwrap(place.read())


class Content(NamedTuple):
    """What stands in a place (raw, MISSING for nothing), made by `entries` from `base`."""

    value: Any
    base: Any
    entries: list[Entry]
    bystanders: Mapping[object, Slot] = {}  # places that held the value before it came here

    @property
    def last(self) -> Entry | None:
        """The outermost patch, whose value stands there."""
        return max(self.entries, key=lambda each: each.order, default=None)


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
    bystanders: Mapping[object, Slot] = field(default_factory=dict)

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
        return Content(self.place.read(), self.base, self.entries, self.bystanders)

    @property
    def is_disturbed(self) -> bool:
        """Somebody else put something in the place after our patch."""
        return bool(self.entries) and self.place.read() is not self.current

    def install(self, content: Content) -> None:
        """Put `content` in the place; what somebody else put there since is not taken away."""
        if content.value is not self.place.read() and not self.is_disturbed:
            self.place.write(content.value)
        self.current = self.original if content.value is MISSING else content.value
        self.base, self.entries, self.bystanders = content[1:]

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
        if not self.follows or place.identity in (self.place.identity, *self.bystanders):
            return False
        last = self.content().last
        if last is None or last.patch.kind == "wrap":
            return True
        # A replacement is also held, in its own right, by the package it comes from.
        return module.partition(".")[0] != last.home.partition(".")[0]


def _pairs(before: Any, after: Any) -> dict[int, object]:
    return {id(before): after, id(unwrap(before)): unwrap(after)}
