"""A real debugger attaches to ranks started by `mindspeed run` and by torchrun."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dap import DebugClient
from tests.sockets import free_ports, listening_addresses

PATIENCE = 120.0
"""Seconds for one answer, which takes a few on an idle machine."""

_LAUNCHERS = {
    "mindspeed run": ["-m", "mindspeed", "run", "--all-ranks", "--nproc", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
_FROM_CODE = "import mindspeed.debug, os; mindspeed.debug.setup_debugpy(base_port={port})\n"
_FROM_ENVIRONMENT = "import torch, mindspeed.megatron_adaptor, os\n"
_REST = "print('rank', os.environ['RANK'], 'goes on', flush=True)\n"


class Job:
    """A started job whose output is read while it runs."""

    def __init__(self, folder: Path, launcher: str, script: str, **variables: str) -> None:
        (folder / "script.py").write_text(script + _REST)
        self.process = subprocess.Popen(
            [sys.executable, *_LAUNCHERS[launcher], "script.py"],
            cwd=folder,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(
            re.sub(r"^\[rank \d\] ", "", line.rstrip()) for line in self.process.stdout
        )

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while text not in self.lines:
            assert time.monotonic() < deadline and self.process.poll() is None, self.lines
            time.sleep(0.05)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=PATIENCE)

    def finish(self) -> list[str]:
        assert self.process.wait(timeout=PATIENCE) == 0, self.lines
        self._reader.join(timeout=PATIENCE)
        return self.lines


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(launcher: str, script: str, **variables: str) -> Job:
        jobs.append(Job(tmp_path, launcher, script, **variables))
        return jobs[-1]

    yield start
    for job in jobs:
        job.stop()


@pytest.fixture
def port() -> int:
    """Return a port that is free, and the one after it too."""
    return free_ports(2)


@pytest.mark.parametrize("launcher", _LAUNCHERS)
def test_each_rank_waits_on_its_own_port(
    launcher: str, port: int, start: Callable[..., Job], tmp_path: Path
) -> None:
    job = start(launcher, _FROM_CODE.format(port=port))
    for rank in (0, 1):
        job.wait_for(f"[Rank {rank}] Waiting for debugger attach on port {port + rank}...")
    for rank in (1, 0):
        client = DebugClient(port + rank)
        client.attach(str(tmp_path / "script.py"), breakpoint_line=2)
        job.wait_for(f"[Rank {rank}] Debugger attached!")
        thread = client.event("stopped")["threadId"]
        frame = client.request("stackTrace", threadId=thread)["stackFrames"][0]
        seen = client.request("evaluate", expression="os.environ['RANK']", frameId=frame["id"])
        assert (frame["line"], seen["result"]) == (2, f"'{rank}'")
        assert f"rank {rank} goes on" not in job.lines
        client.request("continue", threadId=thread)
        client.close()
    assert {"rank 0 goes on", "rank 1 goes on"} <= set(job.finish())


def test_the_variable_alone_selects_a_rank(start: Callable[..., Job]) -> None:
    job = start("mindspeed run", _FROM_ENVIRONMENT, MINDSPEED_DEBUG_RANKS="1")
    job.wait_for("rank 0 goes on")
    job.wait_for("[Rank 1] Waiting for debugger attach on port 22334...")
    client = DebugClient(22334)
    client.attach()
    client.close()
    lines = job.finish()
    assert "[Rank 1] Debugger attached!" in lines and "rank 1 goes on" in lines
    assert not [line for line in lines if line.startswith("[Rank 0]")]


def test_the_debugger_listens_on_loopback_and_leaves_with_its_rank(
    port: int, start: Callable[..., Job]
) -> None:
    job = start("mindspeed run", _FROM_CODE.format(port=port))
    job.wait_for(f"[Rank 0] Waiting for debugger attach on port {port}...")
    assert _listeners(port) == {"127.0.0.1"}
    job.process.terminate()
    assert job.process.wait(timeout=PATIENCE) == 143
    deadline = time.monotonic() + PATIENCE
    while _listeners(port):  # the adapter is a process of its own and notices a moment later
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _listeners(port: int) -> set[str]:
    # The adapter makes itself a daemon, so it is no descendant of the job: inspect every process.
    everyone = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return {address for address, found in listening_addresses(everyone) if found == port}
