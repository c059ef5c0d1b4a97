"""Append measurements to benchmarks/results/<name>.csv with device, versions and commit."""

import csv
import os
import subprocess
from pathlib import Path

import torch

_RESULTS = Path(__file__).parent / "results"


def record(name, rows, folder=_RESULTS):
    """Append rows (dictionaries with the same keys), each with device, versions and commit."""
    context = {
        "device": _device_name(),
        "torch": torch.__version__,
        "megatron_core": _megatron(),
        "commit": _commit(),
    }
    path = Path(folder) / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    known = []
    if path.exists():
        with path.open(newline="") as file:
            known = list(csv.DictReader(file))
    # A file may get new columns: older rows leave them empty.
    rows = [row | context for row in rows]
    columns = [
        *rows[0],
        *(column for column in (known[0] if known else ()) if column not in rows[0]),
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*known, *rows])


def _device_name():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _megatron():
    try:
        import megatron.core
    except ImportError:  # operators can be measured without it
        return ""
    return megatron.core.__version__


def _commit():
    if "MINDSPEED_COMMIT" in os.environ:  # a copy of the tree without its git history
        return os.environ["MINDSPEED_COMMIT"]
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
