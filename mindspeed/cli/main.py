"""The `mindspeed` command, and the like for the `cli` folder of another package.

Every other file of such a folder that has `add_parser(subparsers)` and `run(args) -> int` is a
sub-command.
What is not Python's own is imported in `main`, where Ctrl-C is quiet.
"""

import argparse
import atexit
import ctypes
import importlib
import importlib.metadata
import io
import os
import pkgutil
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import mindspeed.cli

MISUSE = 2
INTERRUPTED = 130
REQUIRED = frozenset(
    ("torch", "megatron", "numpy", "packaging", "pydantic", "rich", "xxhash", "yaml")
    + ("PIL", "gigatoken", "jinja2", "orjson", "peft", "pyarrow", "safetensors", "tensorboard")
    + ("tokenizers", "transformers")
)
"""What `pip install -e ".[llm,mm]"` installs, by the names of modules."""


def main(
    argv: Sequence[str] | None = None,
    package: ModuleType = mindspeed.cli,
    description: str = "Megatron on any device, fast.",
) -> int:
    """Run one sub-command of a package and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return _guard(_prog(package.__name__), lambda: _run(arguments, package, description))


def script() -> NoReturn:
    """Be the process of the `mindspeed` command."""
    exit_process(main())


def run_script(suite: str, command: str) -> NoReturn:
    """Be the process of a script of the root, which is a sub-command of a suite.

    The suite is imported here, where a missing package gets one line and Ctrl-C is quiet.
    """

    def run() -> int:
        code: int = importlib.import_module(f"{suite}.cli.main").main([command, *sys.argv[1:]])
        return code

    exit_process(_guard(_prog(suite), run))


def _guard(prog: str, call: Callable[[], int]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # not every terminal has every character
    try:
        return call()
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name not in REQUIRED:
            raise
        activate = Path(__file__).resolve().parents[2] / ".venv" / "bin" / "activate"
        source = f" (source {activate})" if activate.is_file() else ""
        sys.stderr.write(
            f"{prog}: error: {sys.executable} has no {error.name}: activate the environment that "
            f"has it{source}, or pip install -e '.[llm,mm]' into this one\n"
        )
        return MISUSE


def _prog(package: str) -> str:
    return package.partition(".")[0].replace("_", "-")


def exit_process(code: int) -> NoReturn:
    """Exit as `sys.exit` does, but do not unload modules one by one: a second with torch loaded.

    Threads are joined, exit handlers run and output is flushed as always. With an accelerator the
    exit is Python's own: profilers read their buffers in exit handlers of the C library. So it is
    under a profiler or a debugger of Python, which reports when the program returns to it.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.accelerator.is_available() or _is_observed():
        sys.exit(code)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except KeyboardInterrupt:
        sys.exit(code)  # no thread is waited for any longer, and Python ends the others
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        sys.exit(code)  # Python reports what cannot be written
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


def _is_observed() -> bool:
    """Return whether a profiler, tracer or debugger watches this process."""
    monitoring = getattr(sys, "monitoring", None)  # since 3.12, where cProfile uses it
    tools = monitoring is not None and any(map(monitoring.get_tool, range(6)))
    return bool(tools or sys.getprofile() or sys.gettrace())


def _run(argv: Sequence[str], package: ModuleType, description: str) -> int:
    from mindspeed.config import ConfigError, printable

    parser = build_parser(argv[0] if argv else "", package, description)
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if args.run is None:
            parser.print_help(sys.stderr)
            return MISUSE
        code: int = args.run(args)
        sys.stdout.flush()  # here, where a reader that has left can be noticed
        return code
    except ConfigError as error:
        sys.stderr.write(f"{parser.prog}: error: {printable(str(error))}\n")
        return MISUSE
    except RuntimeError as error:
        from mindspeed.device import DeviceError  # with torch, which --help leaves out

        if not isinstance(error, DeviceError):
            raise
        sys.stderr.write(f"{parser.prog}: error: {printable(str(error))}\n")
        return MISUSE
    except BrokenPipeError:
        # The reader (head, less) has left; without this the flush at exit would complain.
        sys.stdout = None  # type: ignore[assignment]
        return 0


def build_parser(
    chosen: str = "", package: ModuleType = mindspeed.cli, description: str = ""
) -> argparse.ArgumentParser:
    """Build the parser of the command and of its sub-commands, or of the chosen one only."""
    from mindspeed.config import suggest_flags

    parser = argparse.ArgumentParser(
        prog=_prog(package.__name__), description=description, allow_abbrev=False
    )
    suggest_flags(parser)
    parser.add_argument("--version", action=_Version, help="print what a bug report starts with")
    parser.set_defaults(run=None, parser=parser)
    subparsers = parser.add_subparsers(title="commands", metavar="command")
    for command in commands(chosen, package):
        subparser: argparse.ArgumentParser = command.add_parser(subparsers)
        suggest_flags(subparser)
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser


class _Version(argparse.Action):
    """Prints the releases that take part, and ends the command."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        releases = [_release(name) for name in ("mindspeed", "torch", "megatron-core")]
        print(*releases, f"Python {platform.python_version()}", sep=", ")
        parser.exit()


def _release(distribution: str) -> str:
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} (not installed)"


def commands(chosen: str = "", package: ModuleType = mindspeed.cli) -> list[ModuleType]:
    """Import the files of a folder that offer a sub-command, in order of name.

    If one is chosen only that is imported: `doctor` must start where the others' needs are missing.
    """
    names = {found.name.replace("_", "-"): found.name for found in _files(package)}
    chosen_names = [names[chosen]] if chosen in names else sorted(names.values())
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in chosen_names]
    return [module for module in modules if hasattr(module, "add_parser")]


def _files(package: ModuleType) -> list[pkgutil.ModuleInfo]:
    return [found for found in pkgutil.iter_modules(package.__path__) if found.name != "main"]
