"""Switches features on and off in this process, and knows which are on."""

import functools
import logging
from contextlib import ExitStack
from typing import Any

from mindspeed.features.base import Context, Feature
from mindspeed.features.options import CommonOptions
from mindspeed.features.registry import Registry, registry
from mindspeed.features.report import Report
from mindspeed.features.selection import Choice, select
from mindspeed.patching import Patcher

logger = logging.getLogger(__name__)


class Activation:
    """The patcher, the options in force and the features that are on."""

    def __init__(self, features: Registry) -> None:
        self.registry = features
        self.options: CommonOptions = features.options_class()
        self.preset = self.options
        """What was set from Python: the defaults of a Megatron-LM script's flags."""
        self.patcher = Patcher()
        """The patches of features, and those that other projects register by name."""
        self._choices: list[Choice] = []
        self._active: dict[str, _Active] = {}

    def activate(self, options: CommonOptions, context: Context | None = None) -> None:
        """Put exactly these options in force; options given before no longer count.

        Wrong options raise ConfigError before anything is changed. Features that stay on with the
        same options are not touched.
        """
        choices = select(self.registry, options, context or Context())
        before = self.options, self._choices
        try:
            self._switch(options, choices)
        except BaseException:
            self._switch(*before)
            raise

    def deactivate(self) -> None:
        """Undo everything, last feature first."""
        self.preset = self.registry.options_class()
        self._switch(self.preset, [])

    def report(self) -> Report:
        """Tell which features are on, why, and what each of them changed."""
        off = (Choice(feature, False, "nothing is enabled") for feature in self.registry)
        choices = self._choices or list(off)
        effects = {name: active.effects for name, active in self._active.items()}
        return Report(choices, self.patcher.report(), effects)

    def _switch(self, options: CommonOptions, choices: list[Choice]) -> None:
        wanted = {choice.feature.name: choice.feature for choice in choices if choice.on}
        for name, active in reversed(list(self._active.items())):
            if name not in wanted or active.values != _values(wanted[name], options):
                self._leave(name)
        self.options, self._choices = options, choices
        entering = [feature for name, feature in wanted.items() if name not in self._active]
        # Effects first: a patch may import code that needs the device facade or an alias.
        for feature in entering:
            self._active[feature.name] = _Active(feature, options)
        for feature in entering:
            self.patcher.apply(feature.name, feature.patches(options), level=int(feature.level))
            logger.debug("feature %s is on", feature.name)

    def _leave(self, name: str) -> None:
        self.patcher.revert(name)
        self._active.pop(name).undo.close()
        logger.debug("feature %s is off", name)


class _Active:
    """A feature that is on: the option values it was switched on with, and how to undo it."""

    def __init__(self, feature: Feature, options: CommonOptions) -> None:
        self.values = _values(feature, options)
        self.effects: list[str] = []
        with ExitStack() as undo:
            for effect in feature.effects(options):
                undo.enter_context(effect.context)
                self.effects.append(effect.what)
            self.undo = undo.pop_all()


def _values(feature: Feature, options: CommonOptions) -> dict[str, Any]:
    return {field: getattr(options, field) for field in feature.fields}


@functools.cache
def current() -> Activation:
    """Return the one activation of this process."""
    return Activation(registry())
