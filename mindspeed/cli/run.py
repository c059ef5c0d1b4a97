"""`mindspeed run`: run a script or module as N ranks of this machine."""

import argparse
import importlib.machinery
import os
import sys
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError
from mindspeed.launch import LOOPBACK, launch


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="run a script or module as N ranks of this machine",
        usage="mindspeed run [--nproc N] [options] script.py|-m module [arguments]",
        allow_abbrev=False,
    )
    torchruns = ("--nproc-per-node", "--nproc_per_node")
    parser.add_argument(
        "--nproc", *torchruns, type=int, default=1, metavar="N", help="number of ranks (1)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="stop, and show where each rank is, after S seconds",
    )
    parser.add_argument(
        "--all-ranks",
        action="store_true",
        help="show every rank, not only rank 0 (Megatron-LM prints its losses on the last)",
    )
    parser.add_argument(
        "--host", default=LOOPBACK, help=f"address the ranks' store listens on ({LOOPBACK})"
    )
    # A switch, not an option with a value: everything after the module's name is the module's own.
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, not a file")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def run(args: argparse.Namespace) -> int:
    """Start the ranks, wait for them, and report what failed."""
    _check(args)
    command = [sys.executable, *(["-m"] if args.module else []), *args.command]
    # A user who debugs must see which rank waits for the debugger.
    all_ranks = args.all_ranks or bool(os.environ.get("MINDSPEED_DEBUG_RANKS"))
    outcome = launch(command, args.nproc, timeout=args.timeout, all_ranks=all_ranks, host=args.host)
    for text in (outcome.detail, outcome.summary and f"mindspeed run: {outcome.summary}"):
        if text:
            print(text, file=sys.stderr)
    return outcome.exit_code


def _check(args: argparse.Namespace) -> None:
    if args.nproc < 1:
        raise ConfigError(f"--nproc {args.nproc}: give the number of ranks to start, 1 or more")
    if args.timeout is not None and args.timeout <= 0:
        raise ConfigError(f"--timeout {args.timeout:g}: give a number of seconds above 0")
    if not args.command:
        raise ConfigError("nothing to run: give a script (train.py) or -m and a module's name")
    target = args.command[0]
    if not args.module:
        if not Path(target).is_file():
            what = "is a folder" if Path(target).is_dir() else "does not exist"
            raise ConfigError(
                f"{target} {what}: give a Python script, or -m before a module's name"
            )
        return
    package = target.partition(".")[0]
    known = package in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(
        package, [os.getcwd(), *sys.path]
    )
    if not known:
        raise ConfigError(f"no module named {package}: is it installed, or in this folder?")
