"""Run the unit tests of a Megatron-LM checkout under the adaptor and record their results.

    python scripts/megatron_suite.py CHECKOUT --output results.json
    python scripts/megatron_suite_report.py docs/megatron_suite.md core_v0.16.1=results.json

A test is tried with 1 rank; if it does not pass, with 8, which most are written for, then with 4
and 2, unless it has asked for another world size. It passes if it passes on every rank. An
interrupted run is continued by the same command.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_inputs import checkout, earlier
from megatron_suite_rank import (
    Recorder,
    init_rank,
    matches,
    preload,
    read_reasons,
    reason_to_leave_out,
    run_file,
)

from mindspeed.launch.process import die_with_parent

LEFT_OUT = Path(__file__).with_name("megatron_suite_left_out.txt")
_SIZE = re.compile(r"world[_ ]size \(\d+\) is not divisible|(sized with|default) world size \d")
"""Errors of Megatron and torch for a world size that a test does not support."""
Results = dict[str, dict[str, Any]]
ORDER = ("failed", "running", "waiting", "skipped", "passed", "left out")
"""From worst to best: the worst result of the ranks counts."""
STOPPED = "stopped"
"""The reason of ranks that were killed at the deadline; not a result of their tests."""


def main() -> int:
    """Run the tests without a result, and save the results of every file as it ends."""
    options = _options()
    limits = Limits(options.timeout, time.time() + options.stop_after)
    output: Path = options.output[0]
    results: dict[str, Results] = options.output[1]
    _set_environment(options.checkout)
    left_out = dict(read_reasons(LEFT_OUT))
    files = [
        file
        for file in sorted(map(str, Path("tests/unit_tests").rglob("test_*.py")))
        if any(matches(file, each) for each in options.only)
    ]
    if not files:
        print(f"{options.checkout}/tests/unit_tests: no test file is like {' '.join(options.only)}")
        return 2
    if options.again:
        for test in (test for file in files for test in results.get(file, {}).values()):
            test["tried"] = []
    waiting = [file for file in files if not is_finished(results.get(file), options.ranks)]
    waiting.sort(key=lambda file: _expected_length(file, results.get(file, {})), reverse=True)
    preload()
    context = multiprocessing.get_context("fork")
    bind = die_with_parent(os.getpid())
    with ProcessPoolExecutor(options.jobs, mp_context=context, initializer=bind) as pool:
        running = {
            pool.submit(
                run_at_each_size, file, options.ranks, left_out, limits, results.get(file, {})
            ): file
            for file in waiting
        }
        for done in as_completed(running):
            file = running[done]
            known, seconds = done.result()
            if known or time.time() < limits.deadline:  # some files have no tests
                results[file] = known
                _write(output, results)
            if seconds > 1:  # not one that was still waiting at the deadline
                print(f"{seconds:6.0f} s  {file}: {_counts(known)}", flush=True)
    left = sum(not is_finished(results.get(file), options.ranks) for file in files)
    print(f"{left} of {len(files)} files are not finished" if left else "finished")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=checkout, help="folder of Megatron-LM")
    parser.add_argument("--output", type=earlier, default="megatron_suite.json")
    parser.add_argument(
        "--ranks",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 8, 4, 2],
        help="world sizes to try, in this order",
    )
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns of files to run")
    parser.add_argument("--again", action="store_true", help="run tests that did not pass again")
    parser.add_argument("--jobs", type=int, default=1, help="files to run at a time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that one test may take")
    parser.add_argument(
        "--stop-after",
        type=float,
        default=float("inf"),
        help="seconds after which to stop and save the results",
    )
    return parser.parse_args()


def _set_environment(checkout: Path) -> None:
    """Set the environment of a single rank in the folder of the checkout."""
    sys.path.insert(0, str(checkout))
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    # A download, which Megatron tries at the start of every session, fails here at once.
    nowhere = "http://127.0.0.1:9"
    os.environ.update(HTTP_PROXY=nowhere, HTTPS_PROXY=nowhere, NO_PROXY="localhost,127.0.0.1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # What optimizers of other packages compile would take minutes on a cpu.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Two files skip themselves where this names no container or an old one.
    os.environ.setdefault("NVIDIA_PYTORCH_VERSION", "25.06")
    os.chdir(checkout)


def _expected_length(file: str, results: Results) -> tuple[float, int]:
    """Return how long a file may take: its time in an earlier run, else its size."""
    seconds = sum(test.get("seconds", 0) for test in results.values())
    return seconds, Path(file).stat().st_size


def _counts(results: Results) -> str:
    counts = Counter(test["outcome"] for test in results.values())
    return ", ".join(f"{counts[kind]} {kind}" for kind in reversed(ORDER) if counts[kind])


def _write(output: Path, results: dict[str, Results]) -> None:
    """Replace the file atomically: neither a reader nor a kill leaves it incomplete."""
    part = output.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1, sort_keys=True))
    part.replace(output)


@dataclass(frozen=True)
class Limits:
    """Seconds that a test may take, alone and after another rank has failed in it."""

    test: float
    deadline: float
    """The time at which everything stops."""
    after_failure: float = 15.0
    start: float = 240.0


def is_finished(results: Results | None, sizes: Sequence[int]) -> bool:
    """Return whether no test of a file is left to try at any world size."""
    return results is not None and not any(
        _may_pass(had, size) for had in results.values() for size in sizes
    )


def run_at_each_size(
    file: str, sizes: Sequence[int], left_out: Mapping[str, str], limits: Limits, results: Results
) -> tuple[Results, float]:
    """Run a file with each world size, each time the tests that have not passed yet."""
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
            if _rank_result(new) >= _rank_result(had) or not had["tried"]:
                results[test] = had = {**new, "ranks": size}
            had["tried"] = tried
    return results, time.time() - started


def _rank_result(result: dict[str, Any]) -> tuple[int, bool]:
    """Order results of one test: by outcome, then whether the world size was accepted."""
    return ORDER.index(result["outcome"]), _SIZE.search(result.get("cause", "")) is None


def _may_pass(had: dict[str, Any], size: int) -> bool:
    """Return whether a test that did not pass could do so with this world size."""
    if had["outcome"] in ("passed", "left out") or size in had["tried"]:
        return False
    asked = re.search(r"world_size \(\d+\) is not divisible by \D*(\d+)", had.get("cause", ""))
    return asked is None or size % int(asked[1]) == 0


def run_in_rounds(
    file: str, size: int, chosen: list[str], left_out: Mapping[str, str], limits: Limits
) -> Results:
    """Run a file to its end: after a hang or a crash continue with the next tests."""
    results: Results = {}
    while True:
        done = run_once(file, size, chosen, left_out, limits)
        _retry_hangs(done)
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


def _retry_hangs(done: Results) -> None:
    """Mark a test that hung right after a failed one to run again, with new ranks."""
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
    """Fork the ranks, watch their logs, and kill them all when one test takes too long."""
    with (
        tempfile.TemporaryDirectory(prefix="megatron_suite_", ignore_cleanup_errors=True) as folder,
        reserved_port() as port,
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
        return merge_logs(file, logs, reason)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that no other run gets, because its even neighbour is bound meanwhile."""
    # Below the range of ephemeral ports.
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
        init_rank(environment, recorders[rank].log, parent)
        status = run_file(file, recorders[rank])
    finally:
        os._exit(status)


def _watch(ranks: list[int], logs: list[Path], limits: Limits) -> str:
    """Wait for the ranks; return why they had to be stopped, or an empty string."""
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
    """Return whether a rank has failed in the test that another one still runs."""
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


def merge_logs(file: str, logs: list[Path], reason: str) -> Results:
    """Return one result per test from the logs of all ranks."""
    results: Results = {}
    for log in logs:
        for test, result in _read_log(file, log).items():
            if result["outcome"] == "running" and reason == STOPPED:
                result["outcome"] = "waiting"
            elif result["outcome"] == "running":
                where = _stack(log.with_suffix(".out"))
                result.update(outcome="failed", cause=f"{reason or 'the process died'}{where}")
            had = results.setdefault(test, result)
            if _severity(result) < _severity(had):
                results[test] = result
    if results or reason == STOPPED:
        return results
    unknown = {"outcome": "failed", "cause": reason or "the process died before the first test"}
    return {name: dict(unknown) for name in _tests_in(file)}


def _severity(result: dict[str, Any]) -> tuple[int, bool]:
    """Order results from worst to best; a rank that only waited for another one comes last."""
    return ORDER.index(result["outcome"]), _is_consequence(result.get("cause", ""))


def _is_consequence(cause: str) -> bool:
    return "onnection closed by peer" in cause or "no end after" in cause


def _read_log(file: str, log: Path) -> Results:
    """Return the last event of each test in the log of one rank."""
    results: Results = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        event = json.loads(line)
        if "file" in event:
            del event["file"]
            results |= {name: dict(event) for name in _tests_in(file)}
        else:
            results[event.pop("test")] = event
    return results


def _stack(output: Path) -> str:
    """Return the innermost Megatron frame of the stacks that a killed rank wrote."""
    for line in output.read_text(errors="replace").splitlines():
        if line.startswith("  File") and ("/megatron/" in line or "/unit_tests/" in line):
            return " in" + line.strip().removeprefix("File").replace(str(Path.cwd()) + "/", "")
    return ""


def _tests_in(file: str) -> list[str]:
    """List the test functions of a file that cannot be imported."""
    names = []
    for node in ast.parse(Path(file).read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for each in inside:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                names += [f"{file}::{prefix}{each.name}"] if each.name.startswith("test") else []
    return names


if __name__ == "__main__":
    sys.exit(main())
