"""Processes that end with the one that started them."""

import subprocess
import sys
import time

import pytest

from tests.sockets import running

# A process forks one that forks another, and says who they are; all of them wait.
SCRIPT = """
import contextlib, os, time
from mindspeed.launch.process import bound_forks
with bound_forks() if {is_bound} else contextlib.nullcontext():
    if os.fork() == 0:
        if os.fork() == 0:
            print(os.getppid(), os.getpid(), flush=True)
        time.sleep({patience})
time.sleep({patience})
"""
PATIENCE = 20.0


def _survivors(is_bound: bool) -> list[int]:
    """Kill the first process; return those of the others that are still there a little later."""
    script = SCRIPT.format(is_bound=is_bound, patience=PATIENCE)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        forked = list(map(int, first.stdout.readline().split()))
        assert len(forked) == 2 and all(map(running, forked))
        first.kill()
    end = time.monotonic() + (PATIENCE / 2 if is_bound else 0.5)
    while (left := [pid for pid in forked if running(pid)]) and time.monotonic() < end:
        time.sleep(0.01)
    return left


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills with the parent")
def test_what_is_forked_meanwhile_is_killed_with_its_parent() -> None:
    assert _survivors(is_bound=True) == []
    assert len(_survivors(is_bound=False)) == 2  # which end by themselves
