"""MindSpeed from Python: switch features on and off, and see what is on."""

import os
from typing import Any

from mindspeed.config import Spelling, build, load_yaml
from mindspeed.features.activation import Report, current
from mindspeed.features.base import Context, Feature


def enable(*, config: str | os.PathLike[str] | None = None, **options: Any) -> None:
    """Put exactly these options in force, from a YAML file, keywords or both (keywords win).

    Names are those of the flags: `enable(use_fused_swiglu=True)` is `--use-fused-swiglu`. A second
    call replaces the options of the first. Wrong options raise `mindspeed.config.ConfigError`.
    """
    activation = current()
    options_class = activation.registry.options_class
    spelling, values = Spelling.KEYWORD, dict(options)
    if config is not None:
        from_file = load_yaml(config, options_class).as_given()
        spelling, values = Spelling.KEY, options | options_class.merge(from_file, options)
    given = build(options_class, values)
    activation.activate(given, Context(spelling))
    activation.preset = given


def disable() -> None:
    """Switch everything off and undo every patch."""
    current().deactivate()


def report() -> Report:
    """Return which features are on and what each changed; print it to read it."""
    return current().report()


def list_features() -> list[Feature]:
    """Return every feature, lowest level first."""
    return list(current().registry)
