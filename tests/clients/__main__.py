"""Runs other projects' Megatron code on the adaptor: `make clients`, or a part of it.

`python -m tests.clients --only mcore-bridge --model qwen3* --layout tp2` runs a few cases.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from tests.clients.cases import Outcome
from tests.clients.install import FOLDER, ROOT, folders, install
from tests.clients.table import CLIENTS, Client

COLOURS = {"passed": "green", "client": "yellow", "failed": "red", "stale": "red"}


def main() -> int:
    """Install the clients, run their cases and print the table."""
    arguments = _arguments()
    console = Console()
    names = arguments.only.split(",") if arguments.only else [each.name for each in CLIENTS]
    outcomes: list[Outcome] = []
    broken = []
    for client in CLIENTS:
        if client.name not in names:
            continue
        for core in client.cores:
            if arguments.core in (None, core):
                install(client, core)
                broken += _run(client, core, arguments, outcomes, console)
    console.print(_table(outcomes))
    for line in broken:
        console.print(f"[red]{line}")
    fine = sum(outcome.is_fine for outcome in outcomes)
    console.print(f"{fine} of {len(outcomes)} cases pass or fail by the client's own fault")
    return 0 if fine == len(outcomes) and outcomes and not broken else 1


def _arguments() -> argparse.Namespace:
    known = [each.name for each in CLIENTS]
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--only", help=f"clients, with commas between: {', '.join(known)}")
    parser.add_argument("--core", help="one version of megatron-core")
    parser.add_argument("--model", default="*", help="models, with commas between; * and ?")
    parser.add_argument("--layout", default="*", help="layouts, with commas between; * and ?")
    arguments = parser.parse_args()
    unknown = set((arguments.only or known[0]).split(",")) - set(known)
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: the clients are {', '.join(known)}")
    return arguments


def _run(
    client: Client,
    core: str,
    arguments: argparse.Namespace,
    outcomes: list[Outcome],
    console: Console,
) -> list[str]:
    """Run one client on one core; return what to say if it ended before its last case."""
    FOLDER.mkdir(exist_ok=True)
    log = FOLDER / f"{client.name}-{core}.log"
    console.print(f"{client.name} on megatron-core {core}: {log.relative_to(ROOT)}")
    command = [sys.executable, "-m", "tests.clients.worker", client.name, core]
    command += [arguments.model, arguments.layout]
    paths = [*folders(client, core), ROOT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment.setdefault("OMP_NUM_THREADS", "1")
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        for outcome in _results(process):
            outcomes.append(outcome)
            colour = COLOURS[outcome.verdict]
            place = f"{outcome.model:18} {outcome.layout:8}"
            console.print(f"  [{colour}]{outcome.verdict:7}[/] {place} {outcome.seconds:6.1f} s")
    if process.wait():
        return [f"{client.name} on {core} stopped ({process.returncode}): see {log}"]
    return []


def _results(process: "subprocess.Popen[str]") -> Iterator[Outcome]:
    assert process.stdout is not None
    for line in process.stdout:
        yield Outcome(**json.loads(line))


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("client", "core", "model", "layout", "result", "what was seen")
    for each in outcomes:
        result = f"[{COLOURS[each.verdict]}]{each.verdict}"
        table.add_row(each.client, each.core, each.model, each.layout, result, each.detail)
    return table


if __name__ == "__main__":
    sys.exit(main())
