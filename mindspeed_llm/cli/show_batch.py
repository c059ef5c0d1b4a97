"""`mindspeed-llm show-batch`: samples as training sees them, trained tokens in colour."""

import argparse
import sys
from collections.abc import Iterator
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
    parser.add_argument("--tokens", action="store_true", help="one line a token, with its label")
    parser.add_argument("--cache-dir", default="", help=argparse.SUPPRESS)
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="colours (auto)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the samples."""
    from rich.console import Console

    from mindspeed_llm.data.preview import open_preview

    forced = {"auto": None, "always": True, "never": False}[args.color]
    console = Console(file=sys.stdout, force_terminal=forced, highlight=False, soft_wrap=True)
    preview = open_preview(args.prefix, args.tokenizer_name_or_path, args.cache_dir)
    if not 0 <= args.start < preview.size():
        raise ConfigError(
            f"--start {args.start}: {args.prefix} has samples 0 to {preview.size() - 1}"
        )
    console.print(_legend(console.is_terminal), soft_wrap=True)
    for number in islice(range(args.start, preview.size()), max(0, args.count)):
        for sample in preview.samples(number):
            limit = args.seq_length
            console.print(_heading(sample, number, limit), style=HEADING)
            lines = _token_lines(sample) if args.tokens else [_text(sample, limit, console)]
            for line in lines:
                console.print(line)
    return 0


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
    elif not sample.is_ended:
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


def _token_lines(sample: Any) -> Iterator[str]:
    for position, (token, text, label) in enumerate(sample.tokens()):
        trained = "" if label is None else f"label {label}"
        yield f"{position:>6} {token:>7}  {text!r:<24} {trained}"
