"""Options of a run from the command line, a YAML file or both."""

import argparse
from collections.abc import Sequence

from mindspeed.config import ConfigError, add_options, read_options, suggest_flags
from mindspeed.training.options import check_run
from mindspeed_llm.data.instruction import split_parts, split_weights
from mindspeed_llm.training.options import SECTIONS, TrainOptions

OTHER_NAMES = {"--no-pad-to-seq-lengths": "variable_seq_lengths"}
"""Flags that were renamed upstream, under the name that is not the field's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of training."""
    add_options(parser, TrainOptions, SECTIONS)
    for flag, field in OTHER_NAMES.items():
        parser.add_argument(
            flag,
            dest=field,
            action="store_true",
            default=argparse.SUPPRESS,
            help=f"The same as --{field.replace('_', '-')}.",
        )


def from_arguments(namespace: argparse.Namespace) -> TrainOptions:
    """Build the options of training and check them."""
    options = read_options(namespace, TrainOptions)
    check(options)
    return options


def parse(argv: Sequence[str] | None = None) -> TrainOptions:
    """Read the options of a script's command line."""
    parser = argparse.ArgumentParser(description="Train a language model.", allow_abbrev=False)
    add_arguments(parser)
    suggest_flags(parser)
    return from_arguments(parser.parse_args(argv))


def check(options: TrainOptions) -> None:
    """Raise ConfigError for what can never work, before anything is loaded."""
    if not options.data_path:
        raise ConfigError("--data-path is missing: give the --output-prefix of preprocess")
    check_run(options)
    if options.load is None and not options.from_scratch:
        raise ConfigError(
            "--load is missing: give a model or a checkpoint, or --from-scratch for random weights"
        )
    if options.bf16 and options.fp16:
        raise ConfigError("--bf16 and --fp16 exclude each other: drop one")
    split_weights(options.data_path)
    start, end = split_parts(options.split)[1]
    if options.eval_interval and options.eval_iters and start == end:
        raise ConfigError(
            f"--eval-interval {options.eval_interval}: --split {options.split} leaves no data to "
            "evaluate on: give a share, such as --split 98,2,0, or drop --eval-interval"
        )
