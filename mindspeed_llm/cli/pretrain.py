"""`mindspeed-llm pretrain`: train a model on plain documents; one process is one rank."""

import argparse
from typing import Any

from mindspeed.training.entry import importing, run_rank
from mindspeed_llm.training.options import add_arguments, from_arguments


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "pretrain", help="train a model on plain documents", allow_abbrev=False
    )
    add_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train, as one of the ranks."""
    options = from_arguments(args, is_pretraining=True)

    def train() -> None:
        with importing():
            from mindspeed_llm import megatron_adaptor  # noqa: F401  # before any Megatron
            from mindspeed_llm.tasks.pretrain import PretrainTrainer

        PretrainTrainer(options).train()

    return run_rank(train)
