"""`mindspeed debug`: settings with which an editor attaches to the ranks."""

import argparse
import os
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError
from mindspeed.debug import BASE_PORT
from mindspeed.debug.vscode import write_launch_file

_MAX_RANKS = 65536 - BASE_PORT


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "debug", help="write the editor settings that attach to each rank", allow_abbrev=False
    )
    parser.add_argument(
        "--vscode",
        type=int,
        metavar="N",
        required=True,
        help="write .vscode/launch.json for N ranks, keeping entries that are not ours",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        default=Path(".vscode/launch.json"),
        help="write there instead",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a file that cannot be merged (a .bak is kept)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the file and say how to go on."""
    if not 1 <= args.vscode <= _MAX_RANKS:
        raise ConfigError(f"--vscode {args.vscode}: give the number of ranks, 1 to {_MAX_RANKS}")
    if args.output.is_dir():
        raise ConfigError(f"--output {args.output} is a folder: give a file, such as launch.json")
    try:
        backup = write_launch_file(args.output, args.vscode, force=args.force)
    except OSError as error:
        raise ConfigError(f"cannot write {args.output}: {error.strerror}") from error
    if backup is not None:
        print(f"kept the old file as {os.path.relpath(backup)}")
    last = BASE_PORT + args.vscode - 1
    print(f"wrote {args.output}: {args.vscode} ranks on ports {BASE_PORT} to {last}")
    print("start the job with MINDSPEED_DEBUG_RANKS=all (or 0,2 for some), then attach")
    return 0
