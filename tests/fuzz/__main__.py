"""Thousands of damaged inputs: each ends in one clear line, or loses nothing.

`make fuzz` runs 10,000; `python -m tests.fuzz --seed 7 --case 123` shows one of them again.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import forked, subjects
from tests.fuzz import checks
from tests.fuzz.areas import AREAS
from tests.fuzz.draws import Case, Draw

WHOLE = ("preprocess", "convert", "export-lora", "import-gguf", "mm convert")
"""Commands, by how their names begin, that leave nothing behind when they fail."""
KINDS = ("clear error", "accepted", "hang", "traceback", "silent loss")


@dataclass(frozen=True)
class Result:
    """How a case went."""

    number: int
    area: str
    command: str
    kind: str
    """One of KINDS, or what else is wrong."""
    detail: str
    seconds: float


class Fuzzer:
    """The cases of one seed over one folder of good inputs."""

    def __init__(self, folder: Path, seed: int, only: str) -> None:
        self._folder, self._seed = folder, seed
        self.good = folder / "good"
        self._areas = [name for name in AREAS if only in name]
        self._weights = [AREAS[name][0] for name in self._areas]
        self._references: dict[str, forked.End] = {}

    def prepare(self) -> None:
        """Make the good inputs, and what commands make of them."""
        self.good.mkdir()
        subjects.make(self.good)
        for name, target in (("convert saved", "good-saved"), ("mm convert dcp", "good-mm")):
            end = subjects.run(name, "--save-dir", target)
            assert end.code == 0, end
        end = subjects.run("export-lora merge")
        assert end.code == 0, end
        os.rename("out", "good-lora")
        for name in _compared():
            self._references[name] = self._reference(name)

    def _reference(self, name: str) -> forked.End:
        folder = self._folder / "reference"
        subjects.scratch(self.good, folder, (), name)
        os.chdir(folder)
        end = subjects.run(name, seconds=120)  # also beside other work
        assert end.code == 0, (name, end)
        os.chdir(self._folder)
        shutil.rmtree(folder)
        return end

    def draw(self, number: int) -> tuple[str, Case]:
        """Return a case by its number."""
        chosen = random.Random(f"{self._seed} {number}")
        (area,) = chosen.choices(self._areas, self._weights)
        return area, AREAS[area][1](Draw(self.good, f"{self._seed} {number} case"))

    def run(self, number: int) -> tuple[Result, forked.End]:
        """Run a case."""
        area, case = self.draw(number)
        folder = self._folder / f"case-{number}"
        subjects.scratch(self.good, folder, case.files, case.command)
        os.chdir(folder)
        for path, content in case.files.items():
            Path(path).write_bytes(content)
        end = subjects.run(case.command, *case.more)
        kind, detail = self._judge(case, end)
        os.chdir(self._folder)
        shutil.rmtree(folder, ignore_errors=True)
        return Result(number, area, case.command, kind, detail, end.seconds), end

    def _judge(self, case: Case, end: forked.End) -> tuple[str, str]:
        if end.problem:
            lines = end.err.strip().splitlines() or [""]
            return end.problem, lines[-1]
        if end.code:
            left = _left() if case.command.startswith(WHOLE) else []
            return ("something is left behind", str(left)) if left else ("clear error", end.error)
        lost = checks.loss(case.check, end, self._references.get(case.command), self.good)
        return ("silent loss", lost) if lost else ("accepted", "")


def _left() -> list[str]:
    return [path.name for path in Path().glob("out*") if path.is_file() or any(path.iterdir())]


def _compared() -> tuple[str, ...]:
    return (
        *("posttrain hf", "pretrain hf", "posttrain finetune", "posttrain saved", "posttrain lora"),
        *("posttrain dpo", "generate saved", "mm load"),
    )


def work(fuzzer: Fuzzer, numbers: range) -> Iterator[Result]:
    """Run cases one after the other."""
    for number in numbers:
        yield fuzzer.run(number)[0]


def fork_workers(fuzzer: Fuzzer, cases: int, jobs: int) -> Iterator[Result]:
    """Run all cases in processes; yield their results as they come."""
    import selectors

    waiting = selectors.DefaultSelector()
    for job in range(jobs):
        receiver, sender = os.pipe()
        if os.fork() == 0:
            os.close(receiver)
            _serve(fuzzer, range(job, cases, jobs), sender)
        os.close(sender)
        waiting.register(os.fdopen(receiver, "r"), selectors.EVENT_READ)
    while waiting.get_map():
        for key, _ in waiting.select():
            line = key.fileobj.readline()  # type: ignore[union-attr]
            if line:
                yield Result(**json.loads(line))
            else:
                waiting.unregister(key.fileobj)
    for _ in range(jobs):
        if os.wait()[1]:
            raise RuntimeError("a worker of the test itself failed")


def _serve(fuzzer: Fuzzer, numbers: range, sender: int) -> None:
    code = 1
    try:
        for result in work(fuzzer, numbers):
            os.write(sender, (json.dumps(vars(result)) + "\n").encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def show(results: list[Result], seconds: float) -> None:
    """Print the table of all areas."""
    from rich.console import Console
    from rich.table import Table

    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        counts[result.area][result.kind if result.kind in KINDS else "other"] += 1
    columns = (*KINDS, "other")
    table = Table("area", "cases", *columns)
    for area in [*AREAS, "all"]:
        found = counts.get(area, Counter()) if area != "all" else sum(counts.values(), Counter())
        if found:
            table.add_row(area, str(found.total()), *(str(found[name]) for name in columns))
    Console().print(table)
    slowest = max(results, key=lambda result: result.seconds)
    print(
        f"{len(results)} cases in {seconds:.0f} s; the slowest, {slowest.number} "
        f"({slowest.command}), took {slowest.seconds:.1f} s"
    )


def main() -> int:
    """Run the cases and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", metavar="AREA", help="a part of an area's name")
    parser.add_argument("--case", type=int, help="run this case only and show how it ends")
    arguments = parser.parse_args()
    if not any(arguments.only in name for name in AREAS):
        parser.error(f"--only {arguments.only}: the areas are {', '.join(AREAS)}")
    forked.preload()
    started, cwd = time.monotonic(), os.getcwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        fuzzer = Fuzzer(Path(folder).resolve(), arguments.seed, arguments.only)
        fuzzer.prepare()
        if arguments.case is not None:
            return _show_case(fuzzer, arguments.case)
        results = _run_all(fuzzer, arguments)
        os.chdir(cwd)
    show(results, time.monotonic() - started)
    return int(any(result.kind not in KINDS[:2] for result in results))


def _run_all(fuzzer: Fuzzer, arguments: Any) -> list[Result]:
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    results, found = [], 0
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    again = f"--seed {arguments.seed}" + f" --only '{arguments.only}'" * bool(arguments.only)
    print(again, flush=True)
    with Progress(*columns) as progress:
        task = progress.add_task("fuzz", total=arguments.cases)
        for result in fork_workers(fuzzer, arguments.cases, arguments.jobs):
            results.append(result)
            progress.advance(task)
            if result.kind not in KINDS[:2]:
                found += 1
                progress.update(task, description=f"fuzz, {found} found")
                text = f"{result.area}, {result.command}: {result.kind}: {result.detail}"
                progress.console.print(
                    f"{again} --case {result.number}: {text[:300]}", markup=False
                )
    return results


def _show_case(fuzzer: Fuzzer, number: int) -> int:
    area, case = fuzzer.draw(number)
    result, end = fuzzer.run(number)
    os.chdir("/")
    print(f"{area}: {case.command} {' '.join(case.more)}\n{list(case.files)}")
    print(f"{end.out}{end.err}\n{result.kind}: {result.detail} ({result.seconds:.1f} s)")
    return int(result.kind not in KINDS[:2])


if __name__ == "__main__":
    sys.exit(main())
