"""Runs the cases of one client, in a process whose search path begins with the client's folder.

`python -m tests.clients.worker CLIENT CORE MODELS LAYOUTS` prints one line of JSON a case.
"""

import dataclasses
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from fnmatch import fnmatch
from pathlib import Path

from tests.clients.cases import Case, Outcome, OwnFailure, judge
from tests.clients.table import CLIENTS


def main() -> int:
    """Run every case whose model and layout match."""
    name, core, models, layouts = sys.argv[1:]
    client = next(each for each in CLIENTS if each.name == name)
    check = importlib.import_module(client.module)
    # What ranks print goes to stderr: only results are on stdout.
    results, sys.stdout = sys.stdout, sys.stderr
    for case in check.CASES:
        if _matches(case.model, models) and _matches(case.layout, layouts):
            outcome = run(name, core, case, check.OWN)
            results.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            results.flush()
    return 0


def run(client: str, core: str, case: Case, own: list[OwnFailure]) -> Outcome:
    """Run one case in an empty folder and judge what came of it."""
    begin, error, measured = time.monotonic(), None, ""
    with tempfile.TemporaryDirectory(prefix=f"{client}-") as folder:
        try:
            measured = case.run(Path(folder))
        except Exception:
            error = traceback.format_exc()
            sys.stderr.write(f"{client} {core} {case.model} {case.layout}:\n{error}\n")
    verdict, reason = judge(case, core, error, own)
    seconds = round(time.monotonic() - begin, 1)
    detail = reason or measured
    return Outcome(client, core, case.model, case.layout, verdict, detail, seconds)


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns.split(","))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
