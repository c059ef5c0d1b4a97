"""`mindspeed-llm show-batch`: samples as training sees them, trained tokens in colour."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from mindspeed.config import ConfigError

TRAINED, CONTEXT, SPECIAL, TRUNCATED, HEADING = (
    "green",
    "dim",
    "bold cyan",
    "red strike",
    "bold yellow",
)

MAX_RANKS = 1024
"""Ranks that can be shown: each takes a line."""


PAIR_WIDTH = 160
"""Columns of a pair where there is no terminal."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "show-batch",
        help="show preprocessed samples and what of them is trained",
        allow_abbrev=False,
    )
    parser.add_argument("prefix", help="the --output-prefix of preprocessing")
    parser.add_argument(
        "--tokenizer-name-or-path",
        default="",
        metavar="TEXT",
        help="folder of the tokenizer (default: the one of preprocessing)",
    )
    parser.add_argument("--count", type=int, default=3, metavar="N", help="samples to show (3)")
    parser.add_argument("--start", type=int, default=0, metavar="N", help="first sample (0)")
    parser.add_argument(
        "--seq-length", type=int, metavar="N", help="show what a training of this length would cut"
    )
    parser.add_argument(
        "--context-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="show which tokens each of so many ranks would hold (1)",
    )
    parser.add_argument(
        "--cp-document-layout",
        choices=("zigzag", "whole"),
        default="whole",
        help="how these ranks share packed documents (whole)",
    )
    parser.add_argument("--tokens", action="store_true", help="one line a token, with its label")
    parser.add_argument("--cache-dir", default="", help=argparse.SUPPRESS)
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="colours (auto)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the samples."""
    from rich.console import Console

    from mindspeed_llm.data.context_split import ContextSplit
    from mindspeed_llm.data.preview import open_preview

    forced = {"auto": None, "always": True, "never": False}[args.color]
    console = Console(file=sys.stdout, force_terminal=forced, highlight=False, soft_wrap=True)
    preview = open_preview(args.prefix, args.tokenizer_name_or_path, args.cache_dir)
    if not 0 <= args.start < preview.size():
        raise ConfigError(
            f"--start {args.start}: {args.prefix} has samples 0 to {preview.size() - 1}"
        )
    if not 1 <= args.context_parallel_size <= MAX_RANKS:
        raise ConfigError(
            f"--context-parallel-size {args.context_parallel_size}: give 1 to {MAX_RANKS}"
        )
    split = ContextSplit(args.context_parallel_size, document_layout=args.cp_document_layout)
    console.print(_legend(console.is_terminal), soft_wrap=True)
    for number in islice(range(args.start, preview.size()), max(0, args.count)):
        samples = list(preview.samples(number))
        if len(samples) > 1 and not args.tokens:
            console.print(_side_by_side(samples, number, args.seq_length, console))
            continue
        for sample in samples:
            limit = args.seq_length
            console.print(_heading(sample, number, limit), style=HEADING)
            ranks = _ranks(sample, split)
            for line in _rank_lines(sample, ranks, split):
                console.print(line)
            lines = _token_lines(sample, ranks) if args.tokens else [_text(sample, limit, console)]
            for line in lines:
                console.print(line)
            if sample.fields:
                console.print(f"fields for the reward: {sample.fields}", markup=False)
    return 0


def _side_by_side(samples: list[Any], number: int, limit: int | None, console: Any) -> Any:
    """Return the sequences of a pair as the columns of a table."""
    from rich.table import Table
    from rich.text import Text

    width = None if console.is_terminal else PAIR_WIDTH
    table = Table(box=None, width=width, padding=(0, 2, 1, 0), show_edge=False)
    for sample in samples:
        heading = Text(_heading(sample, number, limit), HEADING)
        table.add_column(heading, ratio=1, overflow="fold")
    table.add_row(*(_text(sample, limit, console) for sample in samples))
    return table


def _legend(is_colourful: bool) -> Any:
    from rich.text import Text

    if not is_colourful:
        return Text("[[trained]] given <special token> ~~cut~~")
    labels = [
        ("trained", TRAINED),
        ("given", CONTEXT),
        ("special token", SPECIAL),
        ("cut", TRUNCATED),
    ]
    return Text.assemble(*[part for label in labels for part in (label, "  ")])


def _heading(sample: Any, number: int, limit: int | None) -> str:
    trained = sum(span.is_trained * span.size for span in sample.spans)
    parts = [f"── sample {number}{sample.name}: {sample.size} tokens, {trained} trained"]
    if sample.num_packed > 1:
        parts.append(f"{sample.num_packed} samples packed")
    if sample.padding:
        parts.append(f"{sample.padding} padding")
    if limit is not None and sample.size > limit:
        parts.append(f"cut at {limit}: {sample.size - limit} tokens lost")
    elif sample.needs_end and not sample.is_ended:
        parts.append("no end-of-text token at the end")
    return ", ".join(parts)


def _text(sample: Any, limit: int | None, console: Any) -> Any:
    from rich.text import Text

    text = Text()
    for span in sample.truncated_at(limit):
        if span.starts_sample:
            text.append(f"\n┄┄ packed sample {span.sample_index} ┄┄\n", HEADING)
        style = TRUNCATED if span.is_truncated else SPECIAL if span.is_special else CONTEXT
        if span.is_trained and not span.is_truncated:
            style = f"{SPECIAL} underline" if span.is_special else TRAINED
        if console.is_terminal:
            text.append(span.text, style)
        else:
            marks = ("[[", "]]") if span.is_trained else ("", "")
            marks = ("~~", "~~") if span.is_truncated else marks
            text.append(f"{marks[0]}{span.text}{marks[1]}")
    return text


def _ranks(sample: Any, split: Any) -> list[list[tuple[int, int]]]:
    """Return the tokens of each context-parallel rank, as ranges; nothing for one rank."""
    if split.size == 1 or not sample.size:
        return []
    return [replace(split, rank=rank).owned(sample.bounds) for rank in range(split.size)]


def _rank_lines(sample: Any, ranks: list[list[tuple[int, int]]], split: Any) -> Iterator[str]:
    from mindspeed_llm.data.context_split import MAX_PADDING

    if not ranks:
        return
    padded = split.padded_bounds(sample.bounds)[-1]
    share = padded // len(ranks)
    for rank, ranges in enumerate(ranks):
        count = sum(end - start for start, end in ranges)
        tokens = " ".join(f"{start}-{end - 1}" for start, end in ranges) or "none"
        padding = f", {share - count} padding" if share > count else ""
        yield f"   rank {rank}: {count} tokens{padding}: {tokens}"
    if (waste := 1 - sample.size / padded) > MAX_PADDING:
        yield f"   {waste:.0%} of the {padded} tokens on these ranks are padding"


def _token_lines(sample: Any, ranks: list[list[tuple[int, int]]]) -> Iterator[str]:
    owners = {
        token: f"rank {rank}  "
        for rank, ranges in enumerate(ranks)
        for start, end in ranges
        for token in range(start, end)
    }
    for position, (token, text, label) in enumerate(sample.tokens()):
        trained = "" if label is None else f"label {label}"
        yield f"{position:>6} {token:>7}  {text!r:<24} {owners.get(position, '')}{trained}"
