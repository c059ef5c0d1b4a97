"""Commands in forked children of one process that has imported all they need: milliseconds each.

Every child has a limit of time and of memory; what it starts is ended with it.
"""

import contextlib
import gc
import importlib
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 20.0
MEMORY = 3 << 30
"""Bytes that a command may take in addition to what the preloaded process has."""


PRELOADED = (
    "tests.preload",  # the adaptor first
    "mindspeed_llm.checkpoint.conversion",
    "mindspeed_llm.data.preprocess",
    "mindspeed_llm.generation.session",
    "mindspeed_llm.tasks.posttrain.launcher",
    "mindspeed_llm.tasks.pretrain",
    "mindspeed_mm.checkpoint.conversion",
    "mindspeed_mm.training.trainer",
    "mindspeed_mm.training.setup",
    "mindspeed_mm.training.transformers_task",
)


@dataclass(frozen=True)
class End:
    """How a child ended."""

    code: int | None
    """None: it was ended, because it ran over its time."""
    out: str
    err: str
    seconds: float

    @property
    def error(self) -> str:
        """The one line of the error without what stands before the message, "" if there is none."""
        lines = [line for line in self.err.splitlines() if ": error: " in line]
        return lines[-1].partition(": error: ")[2] if lines else ""

    @property
    def problem(self) -> str:
        """What is wrong with this end: "" for success, and for one clear line with exit code 2."""
        if self.code is None:
            return "hang"
        if "Traceback (most recent call last)" in self.err + self.out:
            return "traceback"
        if self.code not in (0, 2):
            return f"exit code {self.code}"
        lines = self.err.splitlines()
        errors = [line for line in lines if ": error: " in line]
        if len(errors) != (self.code == 2):
            return f"{len(errors)} error lines with exit code {self.code}"
        if errors and lines[-1] is not errors[0]:
            return "something stands behind the error"
        if errors and (len(errors[0]) > 2000 or not errors[0].isprintable()):
            return "not one readable line"
        return ""


def preload() -> None:
    """Import what commands import, once; a child forked later has it all."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # a child that collects garbage would visit, and so copy, all of it


def command(words: list[str]) -> int:
    """Run `mindspeed-llm ...`, `mindspeed-mm ...` or `mindspeed ...`; return its exit code."""
    name, *rest = words
    module = importlib.import_module(f"{name.replace('-', '_')}.cli.main")
    try:
        return int(module.main(rest))
    except SystemExit as exit:  # argparse's own: a line of usage, and the error
        return exit.code if isinstance(exit.code, int) else 1


def run(
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = SECONDS,
    memory: int | None = MEMORY,
) -> End:
    """Call a function in a forked child; what it returns is the exit code."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            _be_child(function, arguments, out.fileno(), err.fileno(), memory)
        code = _wait(child, started + seconds)
        taken = time.monotonic() - started
        return End(code, _read(out), _read(err), taken)


def _be_child(
    function: Callable[..., Any], arguments: tuple[Any, ...], out: int, err: int, memory: int | None
) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
        if memory is not None:  # a child of a child keeps the limit that it has
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + memory, size + memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with _forked_modules():
            code = function(*arguments) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(child: int, deadline: float) -> int | None:
    """Wait for a child until the deadline, then end it and all it has started."""
    pause = 0.001
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            _end_group(child)
            os.waitpid(child, 0)
            return None
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)
    _end_group(child)
    return os.waitstatus_to_exitcode(status)


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _read(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


@contextlib.contextmanager
def _forked_modules() -> Iterator[None]:
    """Let `python -m module` be a fork of this process, which has imported torch already."""
    original = subprocess.run

    def fork(words: Any, *more: Any, **options: Any) -> Any:
        if list(words[:2]) != [sys.executable, "-m"] or set(options) != {"capture_output", "text"}:
            return original(words, *more, **options)
        end = run(_module, [str(word) for word in words[2:]], seconds=SECONDS * 10, memory=None)
        return subprocess.CompletedProcess(words, end.code, end.out, end.err)

    subprocess.run = fork
    try:
        yield
    finally:
        subprocess.run = original


def _module(words: list[str]) -> int:
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    return 0
