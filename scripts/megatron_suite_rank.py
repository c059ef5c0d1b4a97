"""One rank of a Megatron test file: run pytest on it and write each test's result as it ends."""

from __future__ import annotations

import faulthandler
import fnmatch
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed.launch.process import die_with_parent

PRELOADED = (
    "mindspeed.megatron_adaptor",
    "megatron.core",
    "megatron.training.training",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.dist_checkpointing",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.onnx",
    "requests",
    "transformers",
    "pytest",
    "pytest_asyncio.plugin",
    "pytest_mock",
)


@dataclass(eq=False)  # pytest keeps its plugins in sets
class Recorder:
    """A pytest plugin: selects tests, and writes one line of JSON for each of their events."""

    log: Path
    chosen: Sequence[str]
    """The tests to run by name; none means all."""
    left_out: Mapping[str, str]
    """Patterns of tests not to run, each with its reason."""
    _phases: dict[str, dict[str, Any]] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Select the chosen tests; record the ones left out."""
        chosen = set(self.chosen)
        kept = []
        for item in items:
            test = item.nodeid
            if chosen and test not in chosen:
                continue
            reason = reason_to_leave_out(test, self.left_out)
            if reason is None:
                kept.append(item)
                self._write(test=test, outcome="waiting")
            else:
                self._write(test=test, outcome="left out", cause=reason)
        items[:] = kept

    def pytest_collectreport(self, report: Any) -> None:
        """Record a file that cannot be imported, or skips itself as a whole."""
        if report.failed:
            self._write(file=report.nodeid, outcome="failed", cause=_cause(report.longrepr))
        elif report.skipped:
            cause = str(report.longrepr[2]).removeprefix("Skipped: ")
            self._write(file=report.nodeid, outcome="skipped", cause=cause)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the running test: it has failed if no event follows."""
        self._phases[nodeid] = {"outcome": "passed", "cause": "", "start": time.time()}
        self._write(test=nodeid, outcome="running")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Combine set-up, call and tear-down of a test: the worst counts."""
        state = self._phases[report.nodeid]
        if report.failed and state["outcome"] != "failed":
            state.update(outcome="failed", cause=_cause(report.longrepr))
            # At once: the tear-down may wait in vain for another rank.
            self._write(test=report.nodeid, outcome="failed", cause=state["cause"])
        elif report.skipped and state["outcome"] == "passed":
            expected = hasattr(report, "wasxfail")
            cause = report.wasxfail if expected else report.longrepr[2]
            state.update(outcome="skipped", cause=str(cause).removeprefix("Skipped: "))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the result."""
        state = self._phases.pop(nodeid)
        seconds = round(time.time() - state.pop("start"), 2)
        self._write(test=nodeid, seconds=seconds, **state)

    def _write(self, **event: Any) -> None:
        with self.log.open("a") as log:
            log.write(json.dumps(event) + "\n")


def matches(test: str, pattern: str) -> bool:
    """Compare a test's name with a pattern in which only * is special."""
    name, pattern = (each.removeprefix("tests/unit_tests/") for each in (test, pattern))
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def read_reasons(file: Path) -> Iterator[tuple[str, str]]:
    """Read lines of `pattern of tests | reason`."""
    for line in file.read_text().splitlines():
        pattern, bar, reason = line.partition("|")
        if bar and not line.startswith("#"):
            yield pattern.strip(), reason.strip()


def reason_to_leave_out(test: str, left_out: Mapping[str, str]) -> str | None:
    """Return the reason of the first pattern that the test's name matches."""
    return next((why for each, why in left_out.items() if matches(test, each)), None)


def preload() -> None:
    """Import once, before the fork, what every rank needs."""
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)


def init_rank(environment: Mapping[str, str], log: Path, parent: int) -> None:
    """Set up a forked process as a rank: environment, output, stacks on SIGABRT."""
    die_with_parent(parent)()
    os.environ.update(environment, TMPDIR=str(log.parent))
    tempfile.tempdir = None
    descriptor = os.open(log.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(file=2)
    log.touch()
    from mindspeed import device

    device.current().set_index(int(environment["LOCAL_RANK"]))


class GroupPool:
    """Process groups that are created once and reused by the next test.

    Megatron creates dozens for every test and does not destroy them. On gloo each costs all ranks a
    rendezvous and holds threads: after some tests, thousands.
    """

    def __init__(self) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state

        self._dist = dist
        self._make = dist.new_group
        self._destroy = dist.destroy_process_group
        self._destroy_model_parallel = parallel_state.destroy_model_parallel
        self._pool: dict[tuple[object, ...], Any] = {}
        self._world: Any = None
        self._uses: Counter[tuple[object, ...]] = Counter()
        dist.new_group = self.new_group
        dist.destroy_process_group = self.destroy_process_group
        parallel_state.destroy_model_parallel = self.destroy_model_parallel

    def new_group(self, ranks: Any = None, timeout: Any = None, **options: Any) -> Any:
        """Return a group of these ranks that is unused since Megatron last released its groups."""
        if self._world is not self._dist.group.WORLD:
            self._world = self._dist.group.WORLD
            self._pool.clear()
        members = None if ranks is None else tuple(ranks)
        backend = str(options.get("backend") or type(options.get("pg_options")))
        key = (members, str(timeout), backend, options.get("use_local_synchronization"))
        is_first = not self._uses
        self._uses[key] += 1
        slot = (*key, self._uses[key])
        if slot not in self._pool:
            self._pool[slot] = self._make(ranks, timeout, **options)
        elif is_first:
            # Creating a group synchronises the ranks, and tests rely on it: a slow rank still
            # removes the folder of the last test while another one creates it again.
            self._dist.barrier()
        return self._pool[slot]

    def destroy_process_group(self, group: Any = None) -> None:
        """Keep a pooled group: if only its members created a new one, other ranks would hang."""
        if not any(group is pooled for pooled in self._pool.values()):
            self._destroy(group)

    def destroy_model_parallel(self) -> None:
        """Release Megatron's groups, and reuse them from now on."""
        self._destroy_model_parallel()
        self._uses.clear()


def run_file(file: str, recorder: Recorder) -> int:
    """Run one file in this process, as Megatron's own test job does."""
    import pytest

    GroupPool()

    sys.argv = [sys.argv[0]]  # Megatron's parse_args reads it in some tests
    # Other plugins that happen to be installed would cost every rank seconds.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = ("mindspeed.megatron_adaptor", "pytest_asyncio.plugin", "pytest_mock")
    options = [flag for plugin in (*plugins, "no:cacheprovider") for flag in ("-p", plugin)]
    options += ["-o", "addopts=", "-q", "-s", "-W", "ignore", "--tb=short"]
    # Ranks of one run share the folder above this one, other runs have their own.
    options += ["--basetemp", str(recorder.log.with_suffix(".tmp"))]
    return int(pytest.main([*options, file], plugins=[recorder]))


def _cause(representation: Any) -> str:
    """Return the error in one line, with its file and line number."""
    crash = getattr(representation, "reprcrash", None)
    if crash is not None:
        location = "/".join(Path(crash.path).parts[-2:])
        message = next(iter(crash.message.strip().splitlines()), "")
        return f"{message[:240]} ({location}:{crash.lineno})"
    lines = [line for line in str(representation).splitlines() if line.startswith("E  ")]
    return (lines or str(representation).splitlines() or [""])[-1].removeprefix("E").strip()[:240]
