"""`mindspeed-mm train`: train a model of transformers with FSDP2; one process is one rank."""

import argparse
from typing import Any

from mindspeed.training.entry import importing, run_rank
from mindspeed_mm.training.arguments import add_arguments, from_arguments


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train", help="train a model of transformers, from a YAML file", allow_abbrev=False
    )
    add_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train, as one of the ranks."""

    def train() -> None:
        with importing():
            from mindspeed_mm.training import script
            from mindspeed_mm.training.transformers_task import callbacks

        script.train(from_arguments(args), callbacks())

    return run_rank(train)
