"""One result for each test, made of what the ranks wrote while they ran it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]
ORDER = ("failed", "running", "waiting", "skipped", "passed", "left out")
"""From bad to good: the worst answer of the ranks is the answer."""
STOPPED = "stopped"
"""Why ranks ended that had no more time; it tells nothing of their tests."""


def join(file: str, logs: list[Path], reason: str) -> Results:
    """Make one result of what all ranks have said."""
    results: Results = {}
    for log in logs:
        for test, result in _said(file, log).items():
            if result["outcome"] == "running" and reason == STOPPED:
                result["outcome"] = "waiting"
            elif result["outcome"] == "running":
                where = _stack(log.with_suffix(".out"))
                result.update(outcome="failed", cause=f"{reason or 'the process died'}{where}")
            had = results.setdefault(test, result)
            if _gravity(result) < _gravity(had):
                results[test] = result
    if results or reason == STOPPED:
        return results
    silent = {"outcome": "failed", "cause": reason or "the process died before the first test"}
    return {name: dict(silent) for name in _tests_in(file)}


def _gravity(result: dict[str, Any]) -> tuple[int, bool]:
    """Order results from bad to good; a rank that only waited for another one says least."""
    return ORDER.index(result["outcome"]), _is_echo(result.get("cause", ""))


def _is_echo(cause: str) -> bool:
    return "onnection closed by peer" in cause or "no end after" in cause


def _said(file: str, log: Path) -> Results:
    """Return the last word of one rank about each test."""
    said: Results = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        event = json.loads(line)
        if "file" in event:
            del event["file"]
            said |= {name: dict(event) for name in _tests_in(file)}
        else:
            said[event.pop("test")] = event
    return said


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
