"""Decide which features the options switch on, and refuse what cannot work together."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mindspeed.config import ConfigError, one_of
from mindspeed.features.base import ALL_DEVICES, Context, Feature
from mindspeed.features.registry import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """One feature, on or off, and why."""

    feature: Feature
    on: bool
    why: str
    is_known: bool = True
    """False where Megatron decides and its arguments are not known."""

    @property
    def state(self) -> str:
        """on, off, or - where it is not known."""
        return "on" if self.on else "off" if self.is_known else "-"


def select(registry: Registry, options: Any, context: Context) -> list[Choice]:
    """Choose the features that are asked for and whose level is within the requested one.

    Options that have no effect are logged.
    """
    choices = _choose_all(registry, options, context)
    for choice in choices:
        _warn_level(choice, options, context)
        _warn_idle(choice, options, context)
    return choices


def _choose_all(registry: Registry, options: Any, context: Context) -> list[Choice]:
    """Choose and check; log nothing."""
    chosen: dict[str, Choice] = {}

    def choose(feature: Feature) -> Choice:
        if feature.name not in chosen:
            needs = [choose(registry[name]) for name in feature.requires]
            chosen[feature.name] = _choose(feature, needs, options, context)
        return chosen[feature.name]

    choices = [choose(feature) for feature in registry]
    asked_for = [each for each in choices if each.on and not each.feature.is_undecided(options)]
    choices = [_yield(choice, asked_for, registry, options, context) for choice in choices]
    off = {each.feature.name: each for each in choices if each.state == "off"}
    choices = [_without(choice, off, options, context) for choice in choices]
    _check([choice.feature for choice in choices if choice.on], registry, options, context)
    return choices


def accepts(registry: Registry, options: Any, context: Context, changes: Mapping[str, Any]) -> bool:
    """Return whether options would be accepted with some of them, or of Megatron's, changed."""
    ours = {name: value for name, value in changes.items() if name in type(options).model_fields}
    megatron = None if context.megatron is None else {**context.megatron, **changes}
    try:
        _choose_all(registry, options.model_copy(update=ours), replace(context, megatron=megatron))
    except ConfigError:
        return False
    return True


def _warn_level(choice: Choice, options: Any, context: Context) -> None:
    feature = choice.feature
    is_asked_for = not (feature.is_native or feature.is_undecided(options))
    if choice.on or feature.level <= options.optimization_level or not is_asked_for:
        return
    if feature.is_on(options, context):
        switch = feature.spelled(options, context)
        asked = context.spelling.with_value("optimization_level", options.optimization_level)
        logger.warning("%s has no effect: it is level %d, above %s", switch, feature.level, asked)


def _warn_idle(choice: Choice, options: Any, context: Context) -> None:
    feature, spelled = choice.feature, context.spelling.with_value
    for name in feature.idle_fields(options, choice.on):
        given, switch = getattr(options, name), feature.enabled_by
        if given != type(options).model_fields[name].default:
            value = getattr(options, switch) if switch else None
            reason = spelled(switch, value) if switch and value else choice.why
            logger.warning("%s has no effect: %s", spelled(name, given), reason)


def _choose(feature: Feature, needs: list[Choice], options: Any, context: Context) -> Choice:
    switch = feature.spelled(options, context)
    if feature.is_native and context.megatron is None:
        return Choice(feature, False, "Megatron's own configuration decides", is_known=False)
    if feature.is_native:
        is_on = feature.is_on(options, context)
        return Choice(feature, is_on, "in use" if is_on else "not in use")
    if feature.is_undecided(options):
        return _choose_by_device(feature, needs, options, context)
    if not feature.is_on(options, context):
        return Choice(feature, False, f"{switch} is not set")
    if feature.level > options.optimization_level:
        asked = context.spelling.with_value("optimization_level", options.optimization_level)
        return Choice(feature, False, f"level {feature.level:d} is above {asked}")
    name = "" if feature.devices == ALL_DEVICES else context.device or device_name()
    if name and name not in feature.devices:
        reason = f"for {one_of(feature.devices)}, not {name}"
        if feature.enabled_by is not None:
            raise ConfigError(f"{switch} is {reason}: drop it on this machine")
        return Choice(feature, False, reason)
    return Choice(feature, True, f"{switch} is set" if feature.enabled_by else "in use")


def _choose_by_device(
    feature: Feature, needs: list[Choice], options: Any, context: Context
) -> Choice:
    name = context.device or device_name()
    if name not in feature.default_devices:
        return Choice(feature, False, f"{feature.spelled(options, context)} is not set")
    if feature.level > options.optimization_level:
        asked = context.spelling.with_value("optimization_level", options.optimization_level)
        return Choice(feature, False, f"level {feature.level:d} is above {asked}")
    missing = [need.feature.spelled(options, context) for need in needs if need.state == "off"]
    if missing:
        return Choice(feature, False, f"{', '.join(missing)} is off")
    try:
        feature.check(options, context)
    except ConfigError as reason:  # not requested, so no error
        return Choice(feature, False, str(reason))
    return Choice(feature, True, f"on by default on {name}")


def _yield(
    choice: Choice, asked_for: list[Choice], registry: Registry, options: Any, context: Context
) -> Choice:
    """Switch off what is on by default only, where something that was asked for excludes it."""
    if not (choice.on and choice.feature.is_undecided(options)):
        return choice
    for other in (each.feature for each in asked_for):
        reason = registry.conflict(choice.feature, other)
        if reason is not None:
            switch = other.spelled(options, context)
            return Choice(choice.feature, False, f"not together with {switch}: {reason}")
    return choice


def _without(choice: Choice, off: Mapping[str, Choice], options: Any, context: Context) -> Choice:
    """Switch off what is on by default only, where something that it needs has yielded."""
    missing = [off[name].feature for name in choice.feature.requires if name in off]
    if not (choice.on and missing and choice.feature.is_undecided(options)):
        return choice
    names = ", ".join(feature.spelled(options, context) for feature in missing)
    return Choice(choice.feature, False, f"{names} is off")


def _check(features: list[Feature], registry: Registry, options: Any, context: Context) -> None:
    def switch(feature: Feature) -> str:
        return feature.spelled(options, context)

    for feature in features:
        for needed in map(registry.__getitem__, feature.requires):
            unknown = needed.is_native and context.megatron is None
            if needed not in features and not unknown:
                ours, theirs = switch(feature), switch(needed)
                raise ConfigError(f"{ours} needs {theirs}: add {theirs} or drop {ours}")
        for other in features:
            reason = registry.conflict(feature, other)
            if reason is not None:
                one, two = sorted([switch(feature), switch(other)])
                raise ConfigError(f"{one} and {two} cannot be used together: {reason}; drop one")
    for feature in features:
        feature.check(options, context)


def device_name() -> str:
    """Return the name of the current device."""
    # Asking for the device imports torch, which listing the features must not need.
    from mindspeed import device

    return device.current().name
