"""Whether an accepted case lost something in silence."""

import json
import re
from pathlib import Path

import torch

from tests.forked import End

COUNTS = re.compile(r"records +(\d+) in = (\d+) written \+ (\d+) skipped")
NUMBERS = re.compile(r"(?:loss|grad norm): [-+.0-9a-zA-Z]+")
RANK_FILE = "iter_0000001/mp_rank_00/model_optim_rng.pt"


def loss(check: str, end: End, reference: End | None, good: Path) -> str:
    """Return what was lost, "" if nothing; the current folder is that of the case."""
    kind, _, name = check.partition(" ")
    if kind == "records":
        return _records(Path(name), end)
    if kind == "kept":
        return _kept(name, end)
    if kind == "refused":
        return "it was accepted"
    if kind == "numbers":
        assert reference is not None
        return _numbers(end, reference)
    if kind == "weights":
        return _different(_safetensors(Path("out")), _safetensors(good / name))
    if kind == "rank":
        return _different(_rank(Path("out")), _rank(good / "mcore"))
    return ""


def _records(path: Path, end: End) -> str:
    found = COUNTS.search(end.out)
    if found is None:
        return "no count of records"
    records, written, skipped = map(int, found.groups())
    if records != written + skipped or not written:
        return f"{records} in, {written} written, {skipped} skipped"
    expected = _count(path)
    return f"{expected} records, {records} counted" if expected not in (None, records) else ""


def _kept(name: str, end: End) -> str:
    """Compare how many records are written with how many are good."""
    good, _, path = name.partition(" ")
    found = COUNTS.search(end.out)
    if found is not None and found.group(2) != good:
        return f"{found.group(2)} records written, {good} are good"
    return _records(Path(path), end)


def _count(path: Path) -> int | None:
    """Count the records of a file with nothing of ours; None where that takes the whole reader."""
    content = path.read_bytes()
    if path.suffix == ".jsonl":
        return sum(bool(line.strip()) for line in content.split(b"\n"))
    if path.suffix == ".json":
        try:
            found = json.loads(content)
        except ValueError:
            return None
        return len(found) if isinstance(found, list) else None
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return int(pq.ParquetFile(path).metadata.num_rows)
    return None


def _numbers(end: End, reference: End) -> str:
    """Compare losses and gradients of a training, or answers, with those of the good input."""
    ours, theirs = NUMBERS.findall(end.out), NUMBERS.findall(reference.out)
    if not theirs:
        return "" if end.out == reference.out else "another answer"
    return "" if ours == theirs else f"{ours[:2]} instead of {theirs[:2]}"


def _safetensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def _rank(folder: Path) -> dict[str, torch.Tensor]:
    found = torch.load(folder / RANK_FILE, weights_only=True)["model"]
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str:
    if ours.keys() != theirs.keys():
        return f"other tensors: {sorted(ours.keys() ^ theirs.keys())[:3]}"
    wrong = [name for name, value in theirs.items() if not _same(ours[name], value)]
    return f"{len(wrong)} tensors differ: {wrong[:3]}" if wrong else ""


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
