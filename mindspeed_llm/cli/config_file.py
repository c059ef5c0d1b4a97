"""Options of a command from flags, from a YAML file, or from both: a flag wins over the file."""

import argparse
from typing import TypeVar

from mindspeed.config import ConfigError, Options, add_flags, from_namespace, load_yaml

OptionsT = TypeVar("OptionsT", bound=Options)


def add_options(parser: argparse.ArgumentParser, options_class: type[Options]) -> None:
    """Add a flag for every option, and --config."""
    parser.usage = "%(prog)s [--config FILE] [flags]"  # all of them would bury an error
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these options")
    add_flags(parser, options_class)
    for action in parser._actions:
        if action.dest in options_class.model_fields:
            action.default = argparse.SUPPRESS  # what is not given leaves room for the file


def read_options(args: argparse.Namespace, options_class: type[OptionsT]) -> OptionsT:
    """Build the options that were given."""
    defaults = load_yaml(args.config, options_class) if args.config else None
    options = from_namespace(options_class, args, defaults)
    for name, value in options:
        if "\0" in str(value):  # no path can hold it, and no command line can say it
            raise ConfigError(f"{args.config}: {name} holds a NUL character")
    return options
