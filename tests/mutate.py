"""Apply one-line faults to a copy of the tree, one at a time, and run the tests of their areas.

`make mutate` runs all of them; `python -m tests.mutate --only masks --jobs 2` those of one area.
Results are kept in out/mutate.json: a fault runs again when its file or its tests have changed.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.mutations.faults import ROOT, Fault, read_faults

CAUGHT, SURVIVED, BROKEN = "caught", "survived", "broken"
WANTED = 0.9
_PYTEST_FAILED = (1, 2)  # a test failed, or its file could not be imported
_KEPT_OUTPUT = 2000


@dataclass(frozen=True)
class Outcome:
    """What became of a fault."""

    result: str
    seconds: float
    digest: str
    tail: str = ""
    """The end of pytest's output."""


class Tree:
    """A copy of the repository that faults are applied to; the working tree is never changed."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        if (root / ".venv").exists():
            (folder / ".venv").symlink_to((root / ".venv").resolve())
        # Byte code that is checked against the hash of its source: a fault of the same size in
        # the same second would be hidden by byte code that is checked against the time.
        packages = ("mindspeed", "mindspeed_llm", "mindspeed_mm", "tests")
        command = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *packages]
        subprocess.run([sys.executable, *command], cwd=folder, check=False)
        environment = os.environ | {
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._server = subprocess.Popen(
            [sys.executable, "tests/mutations/server.py"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, tests: Sequence[str], limit: float, *options: str) -> tuple[int | None, str]:
        """Run tests; return pytest's exit code, None after the time limit, and its output."""
        output = self.folder.with_suffix(".log")
        arguments = ["-q", "-p", "no:cacheprovider", *options, *tests]
        server = self._server
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps([arguments, str(output)]) + "\n")
        server.stdin.flush()
        session = int(server.stdout.readline())
        ending = threading.Timer(limit, _end_session, [session])
        ending.start()
        try:
            code = int(server.stdout.readline())
        finally:
            ending.cancel()
            _end_session(session)  # what the tests have left running
        if code == -signal.SIGKILL:
            return None, f"ran past the limit of {limit:g} s"
        return code, output.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.communicate()

    def try_fault(self, fault: Fault, limit: float) -> tuple[str, str]:
        """Apply a fault, run its tests and undo it; return the result and the output's end."""
        path = self.folder / fault.file
        text = path.read_text(encoding="utf-8")
        path.write_text(fault.apply(text), encoding="utf-8")
        try:
            code, output = self.run(fault.tests, limit, "-x")
        finally:
            path.write_text(text, encoding="utf-8")
        # Tests that crash have noticed it as well. Those that run past the limit may just be slow:
        # ranks that hang have a shorter limit of their own.
        is_caught = code is not None and (code < 0 or code in _PYTEST_FAILED)
        result = CAUGHT if is_caught else SURVIVED if code == 0 else BROKEN
        return result, output[-_KEPT_OUTPUT:]


def _end_session(number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)


class Results:
    """Outcomes in a JSON file, written after each, so that an interrupted run can go on."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.outcomes: dict[str, Outcome] = {}
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            self.outcomes = {title: Outcome(**values) for title, values in stored.items()}

    def put(self, title: str, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes[title] = outcome
            self._path.parent.mkdir(parents=True, exist_ok=True)
            values = {name: asdict(one) for name, one in sorted(self.outcomes.items())}
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(values, indent=1), encoding="utf-8")
            new.replace(self._path)

    def is_current(self, fault: Fault) -> bool:
        found = self.outcomes.get(fault.title)
        return found is not None and found.result != BROKEN and found.digest == digest(fault)


def digest(fault: Fault) -> str:
    """Return a hash of the fault, of the file it is in and of the tests that have to notice it."""
    found = hashlib.sha256(repr(fault).encode())
    for name in (fault.file, *fault.tests):
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


def run_all(
    faults: Sequence[Fault],
    results: Results,
    jobs: int,
    limit: float,
    report: Callable[[str, str], None],
) -> list[str]:
    """Run faults in `jobs` copies of the tree; return the areas whose tests fail without any."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, ExitStack() as stack:
        trees: queue.Queue[Tree] = queue.Queue()
        for number in range(jobs):
            place = Path(folder, str(number))
            place.mkdir()
            tree = Tree(ROOT, place)
            stack.callback(tree.close)
            trees.put(tree)

        def with_tree(work: Callable[[Tree], Any]) -> Any:
            tree = trees.get()
            try:
                return work(tree)
            finally:
                trees.put(tree)

        def baseline(area: str) -> bool:
            tests = sorted({test for fault in faults if fault.area == area for test in fault.tests})
            code, output = with_tree(lambda tree: tree.run(tests, limit * 4))
            if code != 0:
                broken.append(area)
                print(output[-_KEPT_OUTPUT:], file=sys.stderr)
            report(f"{area} without a fault", "passes" if code == 0 else BROKEN)
            return code == 0

        def one(fault: Fault, area_passes: Future[bool]) -> None:
            if not area_passes.result():
                report(fault.title, "not run")
                return
            began = time.monotonic()
            result, tail = with_tree(lambda tree: tree.try_fault(fault, limit))
            kept = "" if result == CAUGHT else tail
            seconds = round(time.monotonic() - began, 1)
            results.put(fault.title, Outcome(result, seconds, digest(fault), kept))
            report(fault.title, result)

        broken: list[str] = []
        with ThreadPoolExecutor(jobs) as pool:
            work: list[Future[Any]] = []
            for area in sorted({fault.area for fault in faults}):
                passes = pool.submit(baseline, area)
                # Behind the baseline in the queue: none can wait for one that has not begun.
                work += [pool.submit(one, fault, passes) for fault in faults if fault.area == area]
            for done in as_completed(work):
                done.result()
        return broken


def summary(faults: Sequence[Fault], outcomes: dict[str, Outcome], console: Console) -> bool:
    """Print the rate of each area and all survivors; return whether enough were caught."""
    table = Table("area", "faults", "caught", "survived", "broken", "not run", "rate")
    rows = [
        (area, [f for f in faults if f.area == area]) for area in sorted({f.area for f in faults})
    ]
    rate = 0.0
    for area, some in [*rows, ("all", list(faults))]:
        found = [outcomes[f.title].result if f.title in outcomes else "not run" for f in some]
        counts = [found.count(result) for result in (CAUGHT, SURVIVED, BROKEN, "not run")]
        rate = counts[0] / len(some) if some else 0.0
        table.add_row(area, *map(str, [len(some), *counts]), f"{rate:.0%}")
    console.print(table)
    for fault in faults:
        outcome = outcomes.get(fault.title)
        if outcome is not None and outcome.result != CAUGHT:
            reason = fault.reason or "no reason given: add a test that notices it"
            if outcome.result == BROKEN:
                reason = " ".join(outcome.tail.split()[-12:])
            console.print(
                f"{outcome.result}: {fault.title} in {fault.file}: {reason}", soft_wrap=True
            )
    return rate >= WANTED


def selected(faults: Sequence[Fault], only: Sequence[str]) -> list[Fault]:
    """Return the faults that a pattern names: an area, or area/name, with * and ?."""
    patterns = [p if "/" in p else f"{p}/*" for p in only]
    return [f for f in faults if not only or any(fnmatch.fnmatch(f.title, p) for p in patterns)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults that are asked for and have no current result."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="AREA[/NAME]")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="a fault")
    parser.add_argument("--results", type=Path, default=ROOT / "out/mutate.json", metavar="FILE")
    parser.add_argument("--fresh", action="store_true", help="run what has a current result too")
    parser.add_argument("--list", action="store_true", help="print the results and run nothing")
    options = parser.parse_args(arguments)
    console = Console()
    faults = selected(read_faults(), options.only)
    if not faults:
        console.print(f"no fault matches {' '.join(options.only)}")
        return 2
    results = Results(options.results)
    due = [f for f in faults if options.fresh or not results.is_current(f)]
    broken: list[str] = []
    if due and not options.list:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            task = progress.add_task("faults", total=len(due) + len({f.area for f in due}))

            def report(title: str, result: str) -> None:
                progress.console.print(f"{result:9} {title}")
                progress.advance(task)

            broken = run_all(due, results, options.jobs, options.limit, report)
    is_enough = summary(faults, results.outcomes, console)
    for area in broken:
        console.print(f"{area}: its tests fail without a fault; its faults were not run")
    return 0 if is_enough and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
