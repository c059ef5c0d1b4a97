"""Kernels of packages that are compiled while a model is built, each in a process of its own.

The compilers of these packages have one state for a whole process, so threads cannot share it. A
process runs one kernel, which leaves it in the package's cache on disk, where the first layer that
needs it finds it. Every kernel has a file beside that cache. Who compiles the kernel holds a lock
on the file, which the system releases however a process ends, and writes into it when the kernel
is in the cache. So ranks that share a cache compile each kernel once, and no killed process is in
the way of others.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mindspeed import device

LIMIT = 180
"""Seconds after which a process gives up to compile a kernel, or to wait for one that does."""
POLL = 0.02
MIN_CORES = 4
"""With fewer, processes that first import torch take longer than compiling one by one."""


class Kernel(NamedTuple):
    """A function of a module that runs a kernel on a small problem, and its arguments."""

    run: Callable[..., object]
    arguments: tuple[str | int | bool, ...]

    def file(self, folder: Path, versions: Sequence[str]) -> Path:
        """Return the file of this kernel, compiled by packages of these versions."""
        text = json.dumps([*self.call, list(versions)])
        return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.lock"

    @property
    def call(self) -> tuple[str, str, tuple[str | int | bool, ...]]:
        """What another process needs to call it."""
        return self.run.__module__, self.run.__qualname__, self.arguments


def start(kernel: Kernel, file: Path) -> bool:
    """Compile a kernel in a process of its own, unless one has done so, or does; return whether."""
    if len(os.sched_getaffinity(0)) < MIN_CORES or not sys.executable:
        return False
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_compiled(lock):
            return False
        process = _start(kernel, lock)
    except OSError:  # another process has the lock, files have no locks here, or processes are full
        return False
    finally:
        os.close(lock)  # the process has it too, and keeps the lock
    threading.Thread(target=process.wait, daemon=True).start()  # or it stays a zombie
    return True


def _start(kernel: Kernel, lock: int) -> subprocess.Popen[bytes]:
    job = json.dumps([lock, device.current().index(), *kernel.call])
    # The modules of this process: its path may differ from that of a new one. "" is where it is;
    # what is no text, as a Path, Python passes over.
    path = os.pathsep.join(each or os.getcwd() for each in sys.path if isinstance(each, str))
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import main; main()", job],
        pass_fds=[lock],
        env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.PIPE,  # which ends with this process
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # the process that needs the kernel reports why it fails
    )


def main() -> None:
    """Compile the kernel that the command line names."""
    signal.alarm(LIMIT)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lock, index, module, name, arguments = json.loads(sys.argv[1])
    device.current().set_index(index)
    getattr(importlib.import_module(module), name)(*arguments)
    set_compiled(lock)


def _end_with_parent() -> None:
    """End where the process that needs the kernel is gone: it would hold lock and device."""
    sys.stdin.buffer.read()
    os._exit(1)


@contextmanager
def claimed(file: Path) -> Iterator[int | None]:
    """Wait while another process compiles a kernel, and let others wait for this one.

    Yields the lock; None where the kernel is in the cache by now, where files have no locks, and
    where the other process takes too long.
    """
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        yield None
        return
    try:
        yield lock if _acquire(lock) else None
    finally:
        os.close(lock)


def _acquire(lock: int) -> bool:
    """Return whether this process is to compile the kernel, and has the lock."""
    deadline = time.monotonic() + LIMIT
    while not _is_compiled(lock) and time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not _is_compiled(lock)
        except BlockingIOError:
            time.sleep(POLL)
        except OSError:
            return False
    return False


def _is_compiled(lock: int) -> bool:
    return os.fstat(lock).st_size > 0


def set_compiled(lock: int) -> None:
    """Note that the cache has the kernel whose lock this is."""
    os.write(lock, b"compiled\n")
