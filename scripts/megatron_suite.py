"""Run the unit tests of a Megatron-LM checkout under the adaptor and write down what passes.

    python scripts/megatron_suite.py CHECKOUT --output results.json
    python scripts/megatron_suite_report.py results.json ... > docs/megatron_suite.md

A test is tried with 1 rank; if it does not pass, with 8, which most are written for, then with 4
and 2, unless it has asked for a number that this is not. It passes if every rank says so. Run it
again to go on with the files that are missing in the output.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_suite_rank import Recorder, become, matches, preload, run_file

Results = dict[str, dict[str, Any]]
LEFT_OUT = Path(__file__).with_name("megatron_suite_left_out.txt")
ORDER = ("failed", "waiting", "running", "skipped", "passed", "left out")
"""From bad to good: the worst answer of the ranks is the answer."""


@dataclass(frozen=True)
class Limits:
    """Seconds that a test may take: alone, and after another rank has failed in it."""

    test: float
    after_failure: float = 20.0
    start: float = 240.0


def main() -> int:
    """Run what is missing and keep every finished file."""
    options = _options()
    checkout, output = options.checkout.resolve(), options.output.resolve()
    results: Results = json.loads(output.read_text()) if output.exists() else {}
    sys.path.insert(0, str(checkout))
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.chdir(checkout)
    preload()
    left_out = dict(read_left_out())
    for file in sorted(map(str, Path("tests/unit_tests").rglob("test_*.py"))):
        if file in results and not options.again:
            continue
        if not any(matches(file, each) for each in options.only):
            continue
        started = time.time()
        results[file] = run_at_each_size(
            file, options.ranks, left_out, Limits(options.timeout), results.get(file, {})
        )
        output.write_text(json.dumps(results, indent=1, sort_keys=True))
        counts = {kind: 0 for kind in reversed(ORDER)}
        for test in results[file].values():
            counts[test["outcome"]] += 1
        shown = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        print(f"{time.time() - started:6.0f} s  {file}: {shown}", flush=True)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder of Megatron-LM")
    parser.add_argument("--output", type=Path, default=Path("megatron_suite.json"))
    parser.add_argument(
        "--ranks",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 8, 4, 2],
        help="world sizes to try, in this order",
    )
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns of files to run")
    parser.add_argument("--again", action="store_true", help="run what has not passed once more")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that one test may take")
    return parser.parse_args()


def read_left_out() -> Iterator[tuple[str, str]]:
    """Read the patterns of tests that are not run, each with its reason."""
    for line in LEFT_OUT.read_text().splitlines():
        pattern, bar, reason = line.partition("|")
        if bar and not line.startswith("#"):
            yield pattern.strip(), reason.strip()


def run_at_each_size(
    file: str, sizes: Sequence[int], left_out: dict[str, str], limits: Limits, results: Results
) -> Results:
    """Run a file with each number of ranks, each time the tests that have not passed yet."""
    for size in sizes:
        chosen = [test for test, had in results.items() if _may_pass(had, size)] or None
        if chosen is None and results:
            continue
        for test, new in run_in_rounds(file, size, chosen, list(left_out), limits).items():
            had = results.get(test)
            if had is None or ORDER.index(new["outcome"]) >= ORDER.index(had["outcome"]):
                results[test] = {**new, "ranks": size}
    for result in results.values():
        if result["outcome"] == "left out":
            result["cause"] = left_out[result["cause"]]
    return results


def _may_pass(had: dict[str, Any], size: int) -> bool:
    """Say whether a test that did not pass could do so with this number of ranks."""
    asked = re.search(r"world_size \(\d+\) is not divisible by \D*(\d+)", had.get("cause", ""))
    return had["outcome"] in ORDER[:4] and (asked is None or size % int(asked[1]) == 0)


def run_in_rounds(
    file: str, size: int, chosen: list[str] | None, left_out: list[str], limits: Limits
) -> Results:
    """Run a file to its end: after a hang or a crash go on with the tests behind it."""
    results: Results = {}
    while True:
        done = run_once(file, size, chosen, left_out, limits)
        results.update(done)
        chosen = [test for test, result in done.items() if result["outcome"] == "waiting"]
        if not chosen or all(result["outcome"] == "waiting" for result in done.values()):
            break
    for result in results.values():
        if result["outcome"] == "waiting":
            result.update(outcome="failed", cause="the file never started")
    return results


def run_once(
    file: str, size: int, chosen: list[str] | None, left_out: list[str], limits: Limits
) -> Results:
    """Fork the ranks, watch their logs, end them all when one test takes too long."""
    with tempfile.TemporaryDirectory(prefix="megatron_suite_") as folder:
        logs = [Path(folder, f"{rank}.jsonl") for rank in range(size)]
        port = _free_port()
        ranks = [_fork(file, rank, port, logs, chosen, left_out) for rank in range(size)]
        reason = _watch(ranks, logs, limits)
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank, signal.SIGKILL)
        for rank in ranks:
            with suppress(ChildProcessError):
                os.waitpid(rank, 0)
        return _join(file, logs, reason)


def _fork(
    file: str,
    rank: int,
    port: int,
    logs: list[Path],
    chosen: list[str] | None,
    left_out: list[str],
) -> int:
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
            "WORLD_SIZE": str(len(logs)),
            "LOCAL_WORLD_SIZE": str(len(logs)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        become(environment, logs[rank].with_suffix(".out"), parent)
        logs[rank].touch()
        status = run_file(file, Recorder(logs[rank], chosen, left_out))
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
        limit = limits.test if written else limits.start
        if len(running) < len(ranks) or _one_failed(logs):
            limit = limits.after_failure
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


def _join(file: str, logs: list[Path], reason: str) -> Results:
    """Make one result of what all ranks have said."""
    results: Results = {}
    for log in logs:
        said: Results = {}
        for line in log.read_text().splitlines() if log.exists() else []:
            event = json.loads(line)
            if "file" in event:
                del event["file"]
                said |= {name: dict(event) for name in _tests_in(file)}
            else:
                said[event.pop("test")] = event
        for test, result in said.items():
            if result["outcome"] == "running":
                where = _stack(log.with_suffix(".out"))
                result.update(outcome="failed", cause=f"{reason or 'the process died'}{where}")
            had = results.setdefault(test, result)
            if ORDER.index(result["outcome"]) < ORDER.index(had["outcome"]):
                results[test] = result
    silent = {"outcome": "failed", "cause": "the process died before the first test"}
    return results or {name: dict(silent) for name in _tests_in(file)}


def _stack(output: Path) -> str:
    """Name the innermost Megatron line of the stacks that a killed rank wrote."""
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
