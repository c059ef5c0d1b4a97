"""`mindspeed-llm convert`: HF weights to Megatron's, back, and from one layout to another."""

import argparse
import logging
import sys
import time
from typing import Any

from mindspeed.checkpoint.progress import ByteProgress
from mindspeed.config import add_options, read_options
from mindspeed_llm.checkpoint import ConvertOptions


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "convert",
        help="convert weights between HF and Megatron, and between parallel layouts",
        allow_abbrev=False,
    )
    add_options(parser, ConvertOptions)
    return parser


def run(args: argparse.Namespace) -> int:
    """Convert, with a progress bar, and print what was written."""
    options = read_options(args, ConvertOptions)
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    from mindspeed_llm.checkpoint.conversion import convert

    start = time.perf_counter()
    with ByteProgress("converting") as progress:
        done = convert(options, progress.advance)
    seconds = time.perf_counter() - start
    kept = "" if options.params_dtype else " (kept; --params-dtype changes it)"
    print(
        f"{done.family}: {done.nbytes / 1e9:.2f} GB in {done.files} file(s), {done.dtype}{kept}, "
        f"{seconds:.1f} s\n{done.folder}"
    )
    return 0
