"""MindSpeed's flags in the argument parser of a Megatron-LM script."""

import argparse
import functools
from collections.abc import Callable, Iterable
from typing import Any

from mindspeed.config import ConfigError, Spelling, add_flags, from_namespace, suggest_flags
from mindspeed.distributed.environment import is_local_rank_zero
from mindspeed.features.activation import current
from mindspeed.features.base import Context, Feature

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
MISUSE = 2


def wrap_parse_args(original: Callable[..., argparse.Namespace]) -> Callable[..., Any]:
    """Give Megatron's parser our flags through its own `extra_args_provider`."""

    @functools.wraps(original)
    def parse_args(
        extra_args_provider: Provider | None = None, ignore_unknown_args: bool = False
    ) -> argparse.Namespace:
        provider = _Provider(extra_args_provider)
        namespace = original(provider, ignore_unknown_args)
        try:
            _activate(namespace)
        except ConfigError as error:
            # One rank of each machine prints; torch.distributed is not initialized yet.
            message = f"mindspeed: error: {error}\n" if is_local_rank_zero() else None
            provider.parser.exit(MISUSE, message)
        return namespace

    return parse_args


class _Provider:
    """The script's own extra_args_provider, then our flags; keeps the parser it was given."""

    parser: argparse.ArgumentParser

    def __init__(self, inner: Provider | None) -> None:
        self._inner = inner

    def __call__(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        self.parser = parser if self._inner is None else self._inner(parser)
        activation = current()
        group = self.parser.add_argument_group("mindspeed")
        add_flags(group, activation.registry.options_class, defaults=activation.preset)
        _add_choices(self.parser, activation.registry)
        for each in activation.registry:
            shared = {name: getattr(activation.preset, name) for name in each.shared_fields}
            self.parser.set_defaults(**shared)
        suggest_flags(self.parser)
        return self.parser


def _add_choices(parser: argparse.ArgumentParser, features: Iterable[Feature]) -> None:
    added = {name: more for each in features for name, more in each.megatron_choices.items()}
    for action in parser._actions:
        if action.dest in added and action.choices is not None:
            action.choices = [*action.choices, *added[action.dest]]


def _activate(namespace: argparse.Namespace) -> None:
    activation = current()
    # A file given by --yaml-cfg takes the place of all flags; what was set from Python then stays.
    options = from_namespace(
        activation.registry.options_class, namespace, defaults=activation.preset
    )
    activation.activate(options, Context(Spelling.FLAG, megatron=vars(namespace)))
    # The script reads checked values: a tuple of layers, not the text "0,5".
    given = vars(namespace).keys()
    vars(namespace).update((field, value) for field, value in options if field in given)
