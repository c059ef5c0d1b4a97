"""Append measurements to benchmarks/results/<question>.csv with what they were measured on."""

import csv
import os
import subprocess
from pathlib import Path

import torch

_RESULTS = Path(__file__).parent / "results"


def record(question, rows, folder=_RESULTS):
    """Write rows (dictionaries of one shape), each with device, versions and commit."""
    context = {
        "device": _device_name(),
        "torch": torch.__version__,
        "megatron_core": _megatron(),
        "commit": _commit(),
    }
    path = Path(folder) / f"{question}.csv"
    path.parent.mkdir(exist_ok=True)
    known = []
    if path.exists():
        with path.open(newline="") as file:
            known = list(csv.DictReader(file))
    # A question may get more columns than it had: rows of before leave them empty.
    rows = [row | context for row in rows]
    columns = [*rows[0], *(name for name in (known[0] if known else ()) if name not in rows[0])]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*known, *rows])


def _device_name():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _megatron():
    try:
        import megatron.core
    except ImportError:  # an operator can be measured without it
        return ""
    return megatron.core.__version__


def _commit():
    if "MINDSPEED_COMMIT" in os.environ:  # where a copy of the tree is measured without its history
        return os.environ["MINDSPEED_COMMIT"]
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
