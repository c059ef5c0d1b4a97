"""The one import: `import mindspeed.megatron_adaptor` under `import torch`.

Megatron then runs on the device at hand, with the default options. Flags of a Megatron-LM script,
or `mindspeed.enable(...)`, put others in force.
"""

import argparse
import functools
import logging
from collections.abc import Collection, Mapping
from typing import Any

from mindspeed.compat import megatron
from mindspeed.config import build, misspelt
from mindspeed.debug import attach_if_asked
from mindspeed.features import Context, activation

__all__ = ["repatch"]

logger = logging.getLogger(__name__)


def repatch(args: Mapping[str, Any] | object) -> None:
    """Select features again from a client's own arguments, before it builds its groups and model.

    `args` is a mapping or an object with attributes. Names that are options of ours and not None
    are put in force beside those set from Python; all others are the client's, with one warning for
    a misspelt name of ours. Wrong values raise `mindspeed.config.ConfigError` and change nothing.
    """
    given = dict(args) if isinstance(args, Mapping) else vars(args)
    active = activation.current()
    options_class = active.registry.options_class
    named = {name: value for name, value in given.items() if value is not None}
    values = options_class.merge(dict(active.preset), named)
    # The namespace of Megatron's parser is complete; what a dictionary lacks may still be set.
    is_complete = isinstance(args, argparse.Namespace)
    context = Context(megatron=given) if is_complete else Context(client=given)
    active.activate(build(options_class, values), context)
    _warn_of_misspelt(named, options_class.accepted_names())


def _warn_of_misspelt(given: Mapping[str, Any], ours: Collection[str]) -> None:
    for name, value in given.items():
        if value is not False and name not in ours and (meant := misspelt(name, ours)):
            if name not in megatron.config_fields():
                _warn_once(name, meant)


@functools.cache
def _warn_once(name: str, meant: str) -> None:
    logger.warning("repatch: %s is no option of MindSpeed: did you mean %s?", name, meant)


megatron.require()
activation.current().activate(activation.current().registry.options_class())
attach_if_asked()
