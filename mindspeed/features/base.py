"""What a feature is: data that describes it, and the patches and effects that make it work."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

from mindspeed import config
from mindspeed.config import Spelling, flag_name
from mindspeed.patching import Effect, Patch

__all__ = ["ALL_DEVICES", "Context", "Effect", "Feature", "Level", "MegatronFeature", "bind"]

ALL_DEVICES = ("cpu", "cuda", "npu")


class Level(IntEnum):
    """The three layers of `--optimization-level`; each includes the ones below."""

    COMPAT = 0
    AFFINITY = 1
    ALGORITHM = 2


@dataclass(frozen=True)
class Context:
    """What surrounds the options: how they were written, and Megatron's own arguments."""

    spelling: Spelling = Spelling.KEYWORD
    megatron: Mapping[str, Any] | None = None
    """Megatron's parsed arguments; None outside a Megatron-LM script, where they are not known."""
    client: Mapping[str, Any] | None = None
    """Arguments of a client's dictionary, under Megatron's names; others may be set elsewhere."""
    device: str | None = None
    """The device of the run; None for the one here."""

    def argument(self, name: str, default: Any = None) -> Any:
        """Return one of Megatron's arguments, or `default` where it is not known or not set."""
        value = (self.megatron or {}).get(name)
        return default if value is None else value

    def name_of(self, options: config.Options, field: str) -> str:
        """Spell an option as the user did, also where that is an old name."""
        return self.spelling.name_of(options.name_given(field))


def bind(factory: str, *arguments: Any) -> Callable[[Any], Any]:
    """Make a wrap factory of "module:name" that is called with the original and these arguments.

    The module is imported when the patch is applied, since it may need torch and megatron.
    """
    return lambda original: pkgutil.resolve_name(factory)(original, *arguments)


class Feature:
    """One capability. A subclass declares it; the registry finds it by itself.

    `patches` and `effects` may depend on the feature's own options only: they are redone when
    those change, and stay in place when others do.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    group: ClassVar[str]
    level: ClassVar[Level]
    Options: ClassVar[type[config.Options] | None] = None
    enabled_by: ClassVar[str | None] = None
    """The field that switches the feature on; None where a flag of Megatron does."""
    default_devices: ClassVar[tuple[str, ...]] = ()
    """Devices where the feature is on without being asked for, as long as its `check` passes. The
    field is `bool | None` then, and None where it is not given."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Features that must be on as well."""
    conflicts: ClassVar[Mapping[str, str]] = {}
    """Features that must be off, each with the reason; it holds both ways."""
    megatron_flags: ClassVar[tuple[str, ...]] = ()
    """Megatron's own flags that belong to it; the first one switches it on."""
    megatron_choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Values that it adds to Megatron's own flags, by the name of the argument."""
    shared_fields: ClassVar[tuple[str, ...]] = ()
    """Options that Megatron's own parser has as well; their defaults become ours."""
    is_native: ClassVar[bool] = False
    """Megatron does it all; whether it is on depends on Megatron's arguments only."""
    devices: ClassVar[tuple[str, ...]] = ALL_DEVICES

    def is_on(self, options: Any, context: Context) -> bool:
        """Return whether the options request this feature."""
        return self.enabled_by is None or bool(getattr(options, self.enabled_by))

    def is_undecided(self, options: Any) -> bool:
        """Return whether the options leave it to the device."""
        if self.enabled_by is None or not self.default_devices:
            return False
        return getattr(options, self.enabled_by) is None

    def idle_fields(self, options: Any, is_on: bool) -> tuple[str, ...]:
        """Name the options, beside the switch, that nothing reads."""
        return () if is_on else tuple(name for name in self.fields if name != self.enabled_by)

    def check(self, options: Any, context: Context) -> None:
        """Raise ConfigError when the feature is on and cannot work with what surrounds it."""

    def patches(self, options: Any) -> Iterator[Patch]:
        """Yield the patches of this feature."""
        yield from ()

    def effects(self, options: Any) -> Iterator[Effect]:
        """Yield what this feature changes by other means than patches."""
        yield from ()

    @property
    def docs(self) -> str:
        """The page that explains this feature."""
        return f"docs/features/{self.name}.md"

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the feature's own options."""
        return () if self.Options is None else tuple(self.Options.model_fields)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of this feature, ours and Megatron's."""
        return (*map(flag_name, self.fields), *self.megatron_flags)

    def spelled(self, options: Any, context: Context) -> str:
        """Name the feature by the switch that the user wrote."""
        if self.enabled_by is not None:
            return context.name_of(options, self.enabled_by)
        return self.megatron_flags[0] if self.megatron_flags else self.name


class MegatronFeature(Feature):
    """A feature that Megatron implements, on when its first flag is set."""

    level = Level.COMPAT
    is_native = True

    def is_on(self, options: Any, context: Context) -> bool:
        """Read Megatron's own argument."""
        return bool(context.argument(self.megatron_flags[0].lstrip("-").replace("-", "_")))
