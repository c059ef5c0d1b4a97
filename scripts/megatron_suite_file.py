"""One test file of Megatron: its ranks, their time-outs, and the sizes that it is tried at."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_suite_rank import Recorder, become, reason_to_leave_out, run_file
from megatron_suite_results import ORDER, STOPPED, Results, join

_SIZE = re.compile(r"world[_ ]size \(\d+\) is not divisible|(sized with|default) world size \d")
"""What Megatron and torch say to a number of ranks that a test cannot have."""


@dataclass(frozen=True)
class Limits:
    """Seconds that a test may take, alone and after another rank has failed in it."""

    test: float
    deadline: float
    """The time at which everything stops."""
    after_failure: float = 15.0
    start: float = 240.0


def is_finished(results: Results | None, sizes: Sequence[int]) -> bool:
    """Say whether no test of a file is left to try at any size."""
    return results is not None and not any(
        _may_pass(had, size) for had in results.values() for size in sizes
    )


def run_at_each_size(
    file: str, sizes: Sequence[int], left_out: Mapping[str, str], limits: Limits, results: Results
) -> tuple[Results, float]:
    """Run a file with each number of ranks, each time the tests that have not passed yet."""
    started = time.time()
    for size in sizes:
        chosen = [test for test, had in results.items() if _may_pass(had, size)]
        if time.time() > limits.deadline:
            break
        if results and not chosen:
            continue
        for test, new in run_in_rounds(file, size, chosen, left_out, limits).items():
            had = results.setdefault(test, {"outcome": "waiting", "tried": []})
            if new["outcome"] == "waiting":
                continue
            reason = reason_to_leave_out(test, left_out)  # also of a file that cannot be imported
            if reason is not None:
                new = {"outcome": "left out", "cause": reason}
            tried = [*had["tried"], size]
            if _tells(new) >= _tells(had) or not had["tried"]:
                results[test] = had = {**new, "ranks": size}
            had["tried"] = tried
    return results, time.time() - started


def _tells(result: dict[str, Any]) -> tuple[int, bool]:
    """Rank what a size told of a test: how well it went, and whether it went at all."""
    return ORDER.index(result["outcome"]), _SIZE.search(result.get("cause", "")) is None


def _may_pass(had: dict[str, Any], size: int) -> bool:
    """Say whether a test that did not pass could do so with this number of ranks."""
    if had["outcome"] in ("passed", "left out") or size in had["tried"]:
        return False
    asked = re.search(r"world_size \(\d+\) is not divisible by \D*(\d+)", had.get("cause", ""))
    return asked is None or size % int(asked[1]) == 0


def run_in_rounds(
    file: str, size: int, chosen: list[str], left_out: Mapping[str, str], limits: Limits
) -> Results:
    """Run a file to its end: after a hang or a crash go on with the tests behind it."""
    results: Results = {}
    while True:
        done = run_once(file, size, chosen, left_out, limits)
        _put_back(done)
        results.update(done)
        if time.time() > limits.deadline:
            return results
        chosen = [test for test, result in done.items() if result["outcome"] == "waiting"]
        if not chosen:
            return results
        if len(chosen) == len(done):
            for test in chosen:
                results[test] = {"outcome": "failed", "cause": "the file never started"}
            return results


def _put_back(done: Results) -> None:
    """Let a test that hung right behind a failed one wait for ranks that are in step again."""
    before = ""
    for result in done.values():
        is_hang = result["outcome"] == "failed" and "no end after" in result["cause"]
        if is_hang and before == "failed":
            result.clear()
            result["outcome"] = "waiting"
        if result["outcome"] in ("passed", "failed"):
            before = result["outcome"]


def run_once(
    file: str, size: int, chosen: list[str], left_out: Mapping[str, str], limits: Limits
) -> Results:
    """Fork the ranks, watch their logs, end them all when one test takes too long."""
    with (
        tempfile.TemporaryDirectory(prefix="megatron_suite_", ignore_cleanup_errors=True) as folder,
        own_port() as port,
    ):
        logs = [Path(folder, f"{rank}.jsonl") for rank in range(size)]
        recorders = [Recorder(log, chosen, left_out) for log in logs]
        ranks = [_fork(file, rank, port, recorders) for rank in range(size)]
        reason = _watch(ranks, logs, limits)
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank, signal.SIGKILL)
        for rank in ranks:
            with suppress(ChildProcessError):
                os.waitpid(rank, 0)
        return join(file, logs, reason)


@contextmanager
def own_port() -> Iterator[int]:
    """Lend a port that no other run gets, because its even neighbour is held meanwhile."""
    # Below the range from which the system serves those who ask for any port.
    for port in random.sample(range(12000, 32000, 2), 10000):
        with socket.socket() as claim:
            try:
                claim.bind(("127.0.0.1", port))
            except OSError:
                continue
            yield port + 1
            return
    raise RuntimeError("all ports from 12000 to 32000 are in use: stop what uses them")


def _fork(file: str, rank: int, port: int, recorders: Sequence[Recorder]) -> int:
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    os.setsid()
    status = 1
    try:
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(recorders)),
            "LOCAL_WORLD_SIZE": str(len(recorders)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        become(environment, recorders[rank].log, parent)
        status = run_file(file, recorders[rank])
    finally:
        os._exit(status)


def _watch(ranks: list[int], logs: list[Path], limits: Limits) -> str:
    """Wait for the ranks; return why they had to be stopped, or nothing."""
    running = set(ranks)
    size, since = -1, time.time()
    while running:
        time.sleep(0.1)
        for rank in list(running):
            ended, _ = os.waitpid(rank, os.WNOHANG)
            running -= {ended}
        written = sum(log.stat().st_size for log in logs if log.exists())
        if written != size:
            size, since = written, time.time()
        if time.time() > limits.deadline:
            return STOPPED
        limit = limits.test if written else limits.start
        if len(running) < len(ranks) or _one_failed(logs):
            limit = min(limit, limits.after_failure)
        if running and time.time() - since > limit:
            for rank in running:
                os.kill(rank, signal.SIGABRT)
            time.sleep(0.5)
            return f"no end after {limit:.0f} s"
    return ""


def _one_failed(logs: list[Path]) -> bool:
    """Say whether a rank has failed in the test that another one still runs."""
    events = [_last(log) for log in logs]
    running = {event["test"] for event in events if event.get("outcome") == "running"}
    return any(
        event.get("outcome") == "failed" and event.get("test") in running for event in events
    )


def _last(log: Path) -> dict[str, Any]:
    lines = log.read_text().splitlines() if log.exists() else []
    with suppress(ValueError, IndexError):
        event: dict[str, Any] = json.loads(lines[-1])
        return event
    return {}
