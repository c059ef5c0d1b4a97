"""`mindspeed-llm preprocess`: data files to the token files that training reads."""

import argparse
import logging
import sys
from typing import Any

from mindspeed.checkpoint.progress import ByteProgress
from mindspeed.config import ConfigError, add_options, read_options
from mindspeed_llm.data.options import PreprocessOptions
from mindspeed_llm.data.summary import Summary

logger = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "preprocess", help="turn data files into token files for training", allow_abbrev=False
    )
    add_options(parser, PreprocessOptions)
    return parser


def run(args: argparse.Namespace) -> int:
    """Preprocess, or merge, and print a summary of the records."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    options = read_options(args, PreprocessOptions)
    if options.merge_group_keys:
        from mindspeed_llm.data.finalize import merge_groups

        for prefix, pairs in merge_groups(options).items():
            print(f"{prefix}.bin/.idx: {pairs} pairs joined")
        return 0
    try:
        summary = _preprocess(options)
    except OSError as error:
        raise ConfigError(f"{error.filename or options.input}: {error.strerror}") from None
    print(describe(summary, options))
    if summary.truncated.count:
        logger.warning("samples were truncated: they may lack the end-of-text token")
    return 0


def _preprocess(options: PreprocessOptions) -> Summary:
    from mindspeed_llm.data.preprocess import preprocess
    from mindspeed_llm.data.readers import find_sources

    if not sys.stderr.isatty():
        return preprocess(options)
    total = sum([source.size for source in find_sources(options.input)])
    done = 0

    with ByteProgress("preprocessing") as progress:

        def report(summary: Summary, size: int) -> None:
            nonlocal done
            progress.advance(size - done, total)
            done = size

        return preprocess(options, report=report)


def describe(summary: Summary, options: PreprocessOptions) -> str:
    """Describe the summary: a line per count."""
    from mindspeed_llm.data.finalize import token_files
    from mindspeed_llm.data.handlers import find_handler

    handler = find_handler(options.handler_name)
    skipped = summary.skipped_records
    lines = [
        f"records    {summary.records} in = {summary.written} written + {skipped} skipped",
        *(
            f"skipped    {tally.count} x {reason} (first: {tally.first})"
            for reason, tally in summary.skipped.items()
        ),
    ]
    if summary.is_chat and options.seq_length is not None:
        lines.append(f"too long   {summary.describe_too_long(options)}")
    trained = f"{summary.trained} ({summary.trained / max(1, summary.tokens):.0%}) are trained"
    lines.append(f"tokens     {summary.tokens}, of which {trained}")
    lines.append(f"longest    {summary.longest} tokens ({summary.longest_at})")
    if handler is not None and handler.ends_with_answer():
        lines.append(f"ended      {summary.ended} of {summary.written} with an end-of-text token")
    if summary.rows is not None:
        filled = summary.tokens / max(1, summary.rows * (options.seq_length or 1))
        lines.append(f"packed     {summary.rows} rows, {filled:.1%} filled")
    speed = summary.tokens / max(summary.seconds, 1e-9)
    lines.append(f"time       {summary.seconds:.1f} s, {speed:,.0f} tokens/s")
    lines.append(f"files      {token_files(options)}_*_document.bin and .idx")
    return "\n".join(lines)
