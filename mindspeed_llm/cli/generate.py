"""`mindspeed-llm generate`: complete prompts, or chat; one process is one rank."""

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed.config import add_options, read_options
from mindspeed.distributed import environment
from mindspeed.training.entry import importing, run_rank
from mindspeed_llm.generation.options import SECTIONS, GenerateOptions, Task, check, in_vain

logger = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    return declare(subparsers, "generate", "answer prompts: greedy, sampled, beam search or chat")


def declare(subparsers: Any, name: str, summary: str) -> argparse.ArgumentParser:
    """Add a command that takes the options of generation."""
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, allow_abbrev=False)
    add_options(parser, GenerateOptions, SECTIONS)
    return parser


def run(args: argparse.Namespace) -> int:
    """Generate, as one of the ranks."""
    return run_tasks(read_options(args, GenerateOptions))


def run_tasks(options: GenerateOptions) -> int:
    """Run the tasks of the options, or the default task of the prompts."""
    check(options)
    prompts = list(options.prompt)
    if options.prompts is not None:
        from mindspeed_llm.generation.text import read_prompts

        prompts += read_prompts(options.prompts)
    tasks: tuple[Task, ...] = options.task or (("greedy",) if prompts else ("chat",))
    if not prompts and set(tasks) != {"chat"}:
        from mindspeed.config import ConfigError

        raise ConfigError(f"--task {' '.join(tasks)}: give --prompt or --prompts to answer")
    is_first = environment.is_rank_zero()
    level = logging.INFO if is_first else logging.ERROR
    # Standard output is for answers.
    logging.basicConfig(format="%(message)s", level=level, stream=sys.stderr)
    for text in in_vain(options, tasks):
        logger.warning("%s", text)

    def work() -> None:
        with importing():
            from mindspeed_llm import megatron_adaptor  # noqa: F401  # before any Megatron
            from mindspeed_llm.generation.session import Session, run_session

        def lead(session: Session) -> None:
            answering = [task for task in tasks if task != "chat"]
            if answering:
                answers = (a for task in answering for a in session.answers(task, prompts))
                _show(answers, options.output)
            if "chat" in tasks:
                from mindspeed_llm.cli.chat import talk

                talk(session)

        run_session(options, lead, interactive="chat" in tasks)

    return run_rank(work)


def _show(answers: Iterable[Any], output: str | None) -> None:
    """Print answers, or write them to a file, and print the speed."""
    start, tokens = time.perf_counter(), 0
    lines = []
    for answer in answers:
        tokens += len(answer.tokens)
        if output is None:
            print(f"[{answer.task}] {answer.prompt}\n{answer.text}\n", flush=True)
        lines.append(json.dumps(asdict(answer) | {"tokens": len(answer.tokens)}))
    seconds = time.perf_counter() - start
    if output is not None:
        from mindspeed.checkpoint.commit import atomic_write

        atomic_write(Path(output), "".join(f"{line}\n" for line in lines).encode())
    speed = tokens / seconds
    print(f"{tokens} tokens in {seconds:.1f} s, {speed:.1f} tokens/s", file=sys.stderr)
