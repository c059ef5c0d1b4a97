"""`mindspeed-llm evaluate`: score a model on tasks; one process is one rank."""

import argparse
import importlib.metadata
import logging
import sys
from typing import Any

from packaging.requirements import Requirement

from mindspeed.config import ConfigError, add_options, read_options
from mindspeed.distributed import environment
from mindspeed.training.entry import importing, run_rank
from mindspeed_llm.evaluation.options import SECTIONS, EvaluateOptions, check

HARNESS = "lm_eval>=0.4.13,<0.5"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    summary = "score a model on tasks of lm-evaluation-harness, or your own"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "evaluate", help=summary, allow_abbrev=False
    )
    add_options(parser, EvaluateOptions, SECTIONS)
    return parser


def run(args: argparse.Namespace) -> int:
    """Evaluate, as one of the ranks."""
    options = read_options(args, EvaluateOptions)
    check(options)
    _check_harness()
    level = logging.INFO if environment.is_rank_zero() else logging.ERROR
    # Standard output is for the scores.
    logging.basicConfig(format="%(message)s", level=level, stream=sys.stderr)

    def work() -> None:
        with importing():
            from mindspeed_llm import megatron_adaptor  # noqa: F401  # before any Megatron
            from mindspeed_llm.evaluation.run import evaluate

        if (table := evaluate(options)) is not None:
            print(table, flush=True)

    return run_rank(work)


def _check_harness() -> None:
    """Raise ConfigError where the package that has the tasks cannot be used."""
    needed = Requirement(HARNESS)
    try:
        version = importlib.metadata.version(needed.name)
    except importlib.metadata.PackageNotFoundError:
        found = "it is not installed"
    else:
        if needed.specifier.contains(version, prereleases=True):
            return
        found = f"{version} is installed"
    raise ConfigError(f'mindspeed-llm evaluate needs {HARNESS}, {found}: pip install "{HARNESS}"')
