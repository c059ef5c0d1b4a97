"""Runs every payload against every command that reads it; `python -m tests.security.table`."""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests import forked, subjects
from tests.security.payload import Payload
from tests.security.payload_code import CODE, templates
from tests.security.payload_files import PATHS, headers
from tests.security.payload_pickles import CACHES, FOREIGN, pickles
from tests.security.payload_text import jsons, yamls
from tests.security.pickles import TECHNIQUES, run


@dataclass(frozen=True)
class Case:
    """What a command did with a payload."""

    payload: str
    command: str
    problems: list[str]
    error: str
    seconds: float


def all_payloads() -> list[Payload]:
    """Return the table: what is put into which file, and every command that reads that file."""
    single = (*FOREIGN, *CACHES, *CODE, *PATHS)
    return [*single, *pickles(), *templates(), *yamls(), *jsons(), *headers()]


def cases(folder: Path, only: str = "") -> Iterator[Case]:
    """Run the table; `only` is a part of the names to run."""
    good = folder / "good"
    good.mkdir()
    subjects.make(good)
    for technique, code in TECHNIQUES.items():
        canary = folder / "canary"
        forked.run(run, code(str(canary)))
        problems = [] if canary.exists() else ["does not run where nothing is checked"]
        canary.unlink(missing_ok=True)
        yield Case(technique, "pickle.loads", problems, "", 0.0)
    for payload in all_payloads():
        for command in payload.commands:
            if only in f"{payload.name} x {command}":
                yield _case(good, folder / "case", payload, command)
                os.chdir(folder)
                shutil.rmtree(folder / "case")


def _case(good: Path, folder: Path, payload: Payload, command: str) -> Case:
    canary = folder / "canary"
    subjects.scratch(good, folder / "run", payload.changed, command)
    os.chdir(folder / "run")
    payload.poison(str(canary))
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{folder / 'run' / 'bin'}:{path}"
    end = subjects.run(command, seconds=120)  # also beside other work
    os.environ["PATH"] = path
    problems = [end.problem] if end.problem else []
    if canary.exists():
        problems.append("was run")
    if end.code == 0 and not payload.is_harmless:
        problems.append("was accepted")
    if end.code == 2 and payload.named not in end.error:
        problems.append(f"{payload.named} is not named")
    return Case(payload.name, command, problems, end.err[-600:], round(end.seconds, 2))


def main() -> int:
    """Print a line of JSON a case, or with --only the cases of a name in full."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of `payload x command`")
    arguments = parser.parse_args()
    forked.preload()
    cwd, failed = os.getcwd(), False
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder).resolve(), arguments.only):
            print(json.dumps(asdict(case)), flush=True)
            failed = failed or bool(case.problems)
        os.chdir(cwd)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
