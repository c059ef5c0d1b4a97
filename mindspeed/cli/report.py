"""`mindspeed report`: what the given options switch on and patch in the installed Megatron."""

import argparse
import importlib
from contextlib import suppress
from typing import Any

from mindspeed.config import ConfigError, Spelling, add_flags, from_namespace, load_yaml
from mindspeed.features.activation import Activation, current
from mindspeed.features.base import Context
from mindspeed.features.registry import CommonOptions, registry


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="show what options switch on and patch",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="read the options from a YAML file")
    add_flags(parser.add_argument_group("options"), registry().options_class)
    return parser


def run(args: argparse.Namespace) -> int:
    """Switch the features on in this process and print the report."""
    options, spelling = _options(args)
    try:
        importlib.import_module("mindspeed.megatron_adaptor")
    except RuntimeError as error:  # Megatron is missing or too old, or the device is not usable
        raise ConfigError(str(error)) from None
    activation = current()
    activation.activate(options, Context(spelling))
    _import_targets(activation)
    print(activation.report())
    return 0


def _options(args: argparse.Namespace) -> tuple[CommonOptions, Spelling]:
    options_class = registry().options_class
    from_flags = from_namespace(options_class, args)
    if args.config is None:
        return from_flags, Spelling.FLAG
    if from_flags != options_class():
        raise ConfigError("--config and other options are given: write all of them in one place")
    return load_yaml(args.config, options_class), Spelling.KEY


def _import_targets(activation: Activation) -> None:
    """Import what waiting patches wait for, so that the report shows whether they apply."""
    for patch in activation.report().patches:
        if patch.state == "waiting":
            # Not every Megatron has every module: wheels before 0.19 lack megatron.training.
            with suppress(ImportError):
                importlib.import_module(patch.target.partition(":")[0])
