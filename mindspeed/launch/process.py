"""Tie the life of a process to the life of its parent."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import wait

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> Callable[[], None]:
    """Return what a child of the process `parent` calls to be killed when that process dies."""
    # Looked up now, before a fork: between fork and exec nothing may be imported or loaded.
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def bind() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return bind


def leave_with_parent() -> None:
    """End this process of `multiprocessing` when the one that started it ends, on any system.

    The kernel's signal would come when the thread that started it ends, and may not exist.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_after, args=(parent.sentinel,), daemon=True).start()


def _leave_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
