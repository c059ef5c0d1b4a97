"""Switches features on and off in this process, and reports which are on."""

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mindspeed.compat.table import TABLE, Entry
from mindspeed.config import one_of
from mindspeed.features.base import Context, Feature, Level
from mindspeed.features.registry import CommonOptions, Registry, registry
from mindspeed.features.selection import Choice, device_name, select
from mindspeed.patching import Effect, Patch, Patcher, PatchRecord

logger = logging.getLogger(__name__)

HEADER = ("feature", "level", "state", "why")


@dataclass(frozen=True)
class Report:
    """A snapshot of compat entries, features, patches and effects; `str()` is a table."""

    compat: Mapping[str, str]
    """Why each compat entry is off, by name; empty where it is on."""
    choices: Sequence[Choice]
    patches: Sequence[PatchRecord]
    effects: Mapping[str, Sequence[str]]
    """What was changed by other means than patches, by name of the entry or feature."""

    @property
    def on(self) -> tuple[str, ...]:
        """The names of the compat entries and features that are on."""
        return tuple(name for name, _, state, _ in self._rows() if state == "on")

    def __str__(self) -> str:
        listed = sorted(self._rows(), key=lambda row: row[2] != "on")
        rows = [HEADER, *listed]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = []
        for row in rows:
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
            lines.extend(f"    {line}" for line in self._changes(row[0]))
        applied = sum(patch.state == "applied" for patch in self.patches)
        lines.append(
            f"{len(self.on)} of {len(listed)} features on; patches: {applied} applied, "
            f"{len(self.patches) - applied} waiting for their module to be imported"
        )
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        level = str(int(Level.COMPAT))
        for name, why_off in self.compat.items():
            yield name, level, "off" if why_off else "on", why_off or "always on"
        for choice in self.choices:
            yield choice.feature.name, str(int(choice.feature.level)), choice.state, choice.why

    def _changes(self, name: str) -> Iterator[str]:
        yield from self.effects.get(name, ())
        for patch in self.patches:
            if patch.owner == name:
                copies = f", {patch.copies} copies rebound" if patch.state == "applied" else ""
                yield f"{patch.kind} {patch.target}: {patch.state}{copies}"


class Activation:
    """The patcher, the options in force, the compat entries and the features that are on."""

    def __init__(self, features: Registry, compat: Iterable[Entry] = ()) -> None:
        self.registry = features
        self.options: CommonOptions = features.options_class()
        self.preset = self.options
        """What was set from Python: the defaults of a Megatron-LM script's flags."""
        self.context = Context()
        """What surrounds the options in force."""
        self.patcher = Patcher()
        """The patches of features, and those that other projects register by name."""
        self._compat = tuple(compat)
        self._choices: list[Choice] = []
        self._active: dict[str, _Active] = {}

    def activate(self, options: CommonOptions, context: Context | None = None) -> None:
        """Put exactly these options in force; options given before no longer count.

        Wrong options raise ConfigError before anything is changed. Features that stay on with the
        same options are not touched.
        """
        context = context or Context()
        choices = select(self.registry, options, context)
        before = self.options, self._choices, bool(self._active)
        try:
            self._switch(options, choices, is_enabled=True)
        except BaseException:
            self._switch(*before)
            raise
        self.context = context

    def deactivate(self) -> None:
        """Undo everything, last feature first."""
        self.preset, self.context = self.registry.options_class(), Context()
        self._switch(self.preset, [], is_enabled=False)

    def report(self) -> Report:
        """Return which features are on, why, and what each of them changed."""
        nothing = "" if self._active else "nothing is enabled"
        off = (Choice(feature, False, nothing) for feature in self.registry)
        compat = {each.name: nothing or _why_off(each) for each in self._compat}
        effects = {name: active.effects for name, active in self._active.items()}
        return Report(compat, self._choices or list(off), self.patcher.report(), effects)

    def _switch(self, options: CommonOptions, choices: list[Choice], is_enabled: bool) -> None:
        needed = [entry for entry in self._compat if is_enabled and not _why_off(entry)]
        wanted: dict[str, Entry | Feature] = {entry.name: entry for entry in needed}
        wanted.update((each.feature.name, each.feature) for each in choices if each.on)
        leaving = [
            name
            for name, active in reversed(list(self._active.items()))
            if name not in wanted or active.values != _values(wanted[name], options)
        ]
        self.patcher.revert_all(leaving)
        self.options, self._choices = options, choices
        # All that leave are off from here on; one that cannot be undone keeps no other on.
        with ExitStack() as undo:
            for name in reversed(leaving):
                undo.callback(logger.debug, "%s is off", name)
                undo.callback(self._active.pop(name).undo.close)
        entering = [owner for name, owner in wanted.items() if name not in self._active]
        # Effects first: a patch may import code that needs the device facade or an alias.
        for owner in entering:
            self._active[owner.name] = _Active(owner, options)
        # The compat table before features, which may import what it makes run.
        for kind in (Entry, Feature):
            owners = [owner for owner in entering if isinstance(owner, kind)]
            self.patcher.apply_all((each.name, *_patches(each, options)) for each in owners)
        for owner in entering:
            logger.debug("%s is on", owner.name)


class _Active:
    """A feature or entry that is on: the values it was switched on with, and how to undo it."""

    def __init__(self, owner: Entry | Feature, options: CommonOptions) -> None:
        self.values = _values(owner, options)
        self.effects: list[str] = []
        with ExitStack() as undo:
            for effect in _effects(owner, options):
                undo.enter_context(effect.context)
                self.effects.append(effect.what)
            self.undo = undo.pop_all()


def _patches(owner: Entry | Feature, options: CommonOptions) -> tuple[Iterable[Patch], int]:
    if isinstance(owner, Entry):
        return owner.patches, int(Level.COMPAT)
    return owner.patches(options), int(owner.level)


def _effects(owner: Entry | Feature, options: CommonOptions) -> Iterable[Effect]:
    return owner.effects() if isinstance(owner, Entry) else owner.effects(options)


def _values(owner: Entry | Feature, options: CommonOptions) -> dict[str, Any]:
    fields = () if isinstance(owner, Entry) else owner.fields
    return {field: getattr(options, field) for field in fields}


def _why_off(entry: Entry) -> str:
    if entry.devices is None or (here := device_name()) in entry.devices:
        return ""
    return f"for {one_of(entry.devices)}, not {here}"


@functools.cache
def current() -> Activation:
    """Return the one activation of this process."""
    return Activation(registry(), TABLE)
