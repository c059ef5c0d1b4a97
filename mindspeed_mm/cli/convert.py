"""`mindspeed-mm convert`: Hugging Face weights to a sharded checkpoint (DCP) and back."""

import argparse
import time
from typing import Any

from mindspeed.checkpoint.progress import ByteProgress
from mindspeed.config import add_options, read_options
from mindspeed_mm.checkpoint import ConvertOptions


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "convert",
        help="convert weights between a Hugging Face folder and a DCP checkpoint",
        allow_abbrev=False,
    )
    add_options(parser, ConvertOptions)
    return parser


def run(args: argparse.Namespace) -> int:
    """Convert with a progress bar, and print the size and the folder."""
    options = read_options(args, ConvertOptions)
    from mindspeed_mm.checkpoint.conversion import convert

    start = time.perf_counter()
    with ByteProgress("converting") as progress:
        done = convert(options, progress.advance)
    seconds = time.perf_counter() - start
    print(f"{done.tensors} tensors, {done.nbytes / 1e9:.2f} GB, {seconds:.1f} s\n{done.folder}")
    return 0
