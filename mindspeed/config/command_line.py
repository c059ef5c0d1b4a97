"""Options of a command from flags, from a YAML file, or from both: a flag wins over the file."""

import argparse
from collections.abc import Sequence
from typing import TypeVar

from mindspeed.config.errors import ConfigError
from mindspeed.config.flags import add_flags, from_namespace
from mindspeed.config.options import Options
from mindspeed.config.yaml_file import load_yaml

OptionsT = TypeVar("OptionsT", bound=Options)


def add_options(
    parser: argparse.ArgumentParser,
    options_class: type[Options],
    sections: Sequence[type[Options]] = (),
) -> None:
    """Add --config and a flag for every option, under the titles of its sections if there are."""
    parser.usage = "%(prog)s [--config FILE] [flags]"  # all of them would fill a screen
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these options")
    for section in sections:
        title = section.__name__.removesuffix("Options").lower()
        add_flags(parser.add_argument_group(title, section.__doc__), section)
    add_flags(parser.add_argument_group("mindspeed") if sections else parser, options_class)
    for action in parser._actions:
        if action.dest in options_class.model_fields:
            action.default = argparse.SUPPRESS  # what is not given leaves room for the file


def read_options(namespace: argparse.Namespace, options_class: type[OptionsT]) -> OptionsT:
    """Build the options that were given, by a flag or in the file; the others count as not set."""
    if namespace.config:
        values = load_yaml(namespace.config, options_class).model_dump(exclude_unset=True)
        for name, value in values.items():
            if "\0" in str(value):  # no path can hold it, and no command line can say it
                raise ConfigError(f"{namespace.config}: {name} holds a NUL character")
        namespace = argparse.Namespace(**values | vars(namespace))
    return from_namespace(options_class, namespace)
