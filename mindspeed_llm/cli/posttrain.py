"""`mindspeed-llm posttrain`: fine-tune a model; one process is one rank."""

import argparse
from typing import Any

from mindspeed.training.entry import importing, run_rank
from mindspeed_llm.training.options import add_arguments, from_arguments


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "posttrain",
        help="train a model on answers or preferences (--stage sft, dpo, ...)",
        allow_abbrev=False,
    )
    add_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train, as one of the ranks."""
    options = from_arguments(args)

    def train() -> None:
        with importing():
            from mindspeed_llm import megatron_adaptor  # noqa: F401  # before any Megatron
            from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer

        AutoTrainer(options).train()

    return run_rank(train)
