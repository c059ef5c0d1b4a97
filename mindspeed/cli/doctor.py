"""`mindspeed doctor`: what is installed, what is missing, and whether training can start."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from mindspeed.doctor import Check, is_ready, run_checks


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="check this machine and list what is missing", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print the records as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the checks; return 0 when a training run could start, else 1."""
    checks = run_checks()
    print(_as_json(checks) if args.json else _as_lines(checks))
    return 0 if is_ready(checks) else 1


def _as_json(checks: Sequence[Check]) -> str:
    records = [dataclasses.asdict(check) for check in checks]
    return json.dumps({"ready": is_ready(checks), "checks": records}, indent=2)


def _as_lines(checks: Sequence[Check]) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        lines.append(f"{check.status.value:<4}  {check.name:<{width}}  {check.detail}{remedy}")
    verdict = "ready to train" if is_ready(checks) else "not ready: fix the lines marked fail"
    return "\n".join([*lines, verdict])
