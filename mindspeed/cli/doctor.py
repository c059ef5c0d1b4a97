"""`mindspeed doctor`: what is installed, what is missing, and whether training can start."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspeed.config import ConfigError
from mindspeed.doctor import Check, is_ready, run_checks

if TYPE_CHECKING:
    from mindspeed.doctor.memory import Fit


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="check this machine and list what is missing", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print the records as JSON")
    parser.add_argument(
        "--device-gib", type=float, metavar="X", help="memory of the GPU that --memory is about"
    )
    parser.add_argument(
        "--memory",
        nargs=argparse.REMAINDER,
        metavar="FLAGS",
        help="the flags of a training run, or its YAML file: what it needs, and what would fit",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the checks; return 0 when a training run could start, and fits, else 1."""
    fit = None if args.memory is None else _examine(args.memory, args.device_gib)
    checks = run_checks()
    if args.json:
        print(_as_json(checks, fit))
    else:
        print("\n".join([_as_lines(checks), *(fit.lines() if fit else ())]))
    return 0 if is_ready(checks) and (fit is None or fit.fits) else 1


def _examine(flags: Sequence[str], gib: float | None) -> "Fit":
    """Return the memory of a run on this device, or on a GPU with so many GiB."""
    # They import torch, without which the checks have to run.
    from mindspeed import device
    from mindspeed.doctor.memory import examine

    for flag in ("--json", "--device-gib"):
        if flag in (word.partition("=")[0] for word in flags):
            raise ConfigError(f"{flag} after --memory is no flag of the run: put it before")
    if gib is not None and not 0 < gib < 2**20:
        raise ConfigError(f"--device-gib {gib:g}: give the GiB of a device, as 80")
    if gib is None:
        return examine(flags, device.current().memory_total())
    return examine(flags, int(gib * 2**30), device_name="cuda")


def _as_json(checks: Sequence[Check], fit: "Fit | None") -> str:
    records: dict[str, Any] = {"ready": is_ready(checks)}
    records["checks"] = [dataclasses.asdict(check) for check in checks]
    return json.dumps(records | ({"memory": fit.as_record()} if fit else {}), indent=2)


def _as_lines(checks: Sequence[Check]) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        lines.append(f"{check.status.value:<4}  {check.name:<{width}}  {check.detail}{remedy}")
    verdict = "ready to train" if is_ready(checks) else "not ready: fix the lines marked fail"
    return "\n".join([*lines, verdict])
