"""`mindspeed-llm posttrain`: fine-tune a model; one process is one rank."""

import argparse
from typing import Any

from mindspeed.training.entry import importing, run_rank
from mindspeed_llm.training.options import SECTIONS, TaskOptions, add_arguments, from_arguments

DESCRIPTION = """\
Train a model on answers (--stage sft), preferences (dpo, simpo, kto), rewards
(orm, prm) or completions that it samples itself (trl_ppo, grpo). A run needs
--load, --data-path, --lr and one of --train-iters and --epochs; --save keeps
what it trains, and the same command resumes it:

  python posttrain_gpt.py --stage dpo --load model --data-path pairs.jsonl \\
      --prompt-type tokenizer --variable-seq-lengths --micro-batch-size 2 \\
      --lr 1e-6 --epochs 1 --save saved

On several ranks: mindspeed run --nproc 2 posttrain_gpt.py ...
docs/llm has pages on all stages: train.md, preferences.md and ppo_grpo.md.
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "posttrain",
        help="train a model on answers or preferences (--stage sft, dpo, ...)",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser, (TaskOptions, *SECTIONS))
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
