"""No command runs what is in a file: every payload is refused in one line that names the file."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.security.pickles import TECHNIQUES
from tests.security.table import all_payloads

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 800


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    """Run the table once, in a process that has no thread and can be forked."""
    command = [sys.executable, "-m", "tests.security.table"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout, done.stderr
    by_payload = defaultdict(list)
    for line in done.stdout.splitlines():
        case = json.loads(line)
        by_payload[case["payload"]].append(case)
    return by_payload


def test_there_are_enough() -> None:
    names = [payload.name for payload in all_payloads()]
    assert len(set(names)) == len(names) >= 60


@pytest.mark.parametrize("name", [*TECHNIQUES, *(payload.name for payload in all_payloads())])
def test_is_refused(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    assert found[name], "was not run"
    wrong = [case for case in found[name] if case["problems"]]
    assert not wrong, "\n".join(f"{c['command']}: {c['problems']}\n{c['error']}" for c in wrong)
