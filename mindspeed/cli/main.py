"""The `mindspeed` command.

Every other file of this folder is a sub-command: `add_parser(subparsers)` and `run(args) -> int`.
"""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

import mindspeed.cli
from mindspeed.config import ConfigError, suggest_flags

MISUSE = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser(argv[0] if argv else "")
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if args.run is None:
            parser.print_help(sys.stderr)
            return MISUSE
        code: int = args.run(args)
        return code
    except ConfigError as error:
        sys.stderr.write(f"mindspeed: error: {error}\n")
        return MISUSE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has left; without this the flush at exit would complain.
        sys.stdout = None  # type: ignore[assignment]
        return 0


def build_parser(chosen: str = "") -> argparse.ArgumentParser:
    """Build the parser of the command and of its sub-commands, or of the chosen one only."""
    parser = argparse.ArgumentParser(
        prog="mindspeed", description="Megatron on any device, fast.", allow_abbrev=False
    )
    suggest_flags(parser)
    parser.set_defaults(run=None, parser=parser)
    subparsers = parser.add_subparsers(title="commands", metavar="command")
    for command in commands(chosen):
        subparser: argparse.ArgumentParser = command.add_parser(subparsers)
        suggest_flags(subparser)
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser


def commands(chosen: str = "") -> list[ModuleType]:
    """Import the files of this folder that offer a sub-command, in order of name.

    If one is chosen only that is imported: `doctor` must start where the others' needs are missing.
    """
    names = sorted(found.name for found in pkgutil.iter_modules(mindspeed.cli.__path__))
    names = [chosen] if chosen in names else names
    modules = [importlib.import_module(f"mindspeed.cli.{name}") for name in names if name != "main"]
    return [module for module in modules if hasattr(module, "add_parser")]
