"""Tie the lifetime of a process to that of its parent."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
# Looked up now, before a fork: between fork and exec nothing may be imported or loaded.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_bind: ContextVar[Callable[[], None] | None] = ContextVar("bind", default=None)
"""What a forked process calls first."""


def die_with_parent(parent: int) -> Callable[[], None]:
    """Return what a child of the process `parent` calls to be killed when that process dies."""

    def bind() -> None:
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return bind


@contextmanager
def bound_forks() -> Iterator[None]:
    """Have what is forked meanwhile, here and by what is forked, killed when its parent dies.

    Libraries fork processes that wait for their parent for ever. They have to be forked by a thread
    that lives as long as they do: the kernel takes its end for that of the parent.
    """
    token = _bind.set(die_with_parent(os.getpid()))
    try:
        yield
    finally:
        _bind.reset(token)


def _bind_fork() -> None:
    if (bind := _bind.get()) is not None:
        _bind.set(die_with_parent(os.getpid()))
        bind()


os.register_at_fork(after_in_child=_bind_fork)


def is_suspended(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP or a debugger, where the system reports it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


def ignore_stop_signals() -> None:
    """Make this process, and what it executes, outlive the signals that ask a whole job to stop.

    Schedulers send them to every process: those that serve the ranks are needed for the last save.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def start_workers(loader: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over a loader; SIGTERM is held back while it forks its workers.

    Libraries start threads in a forked process before `start_worker` runs there: they inherit this.
    """
    if not hasattr(signal, "pthread_sigmask"):
        return iter(loader)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(then: Callable[[int], None] | None, number: int) -> None:
    """Begin as a data worker that only its parent ends, then run `then`, a worker_init_fn.

    A signal for all processes would end workers before the batches of the last step.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # for the new thread as well
        threading.Thread(target=_exit_for_parent, daemon=True).start()
    if then is not None:
        then(number)


def _exit_for_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def exit_with_parent() -> None:
    """End this process of `multiprocessing` when the one that started it ends, on any system.

    The kernel's signal would come when the thread that started it ends, and may not exist.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
