"""Documents as they are found, the files of Python's standard library, and their attention."""

import sysconfig
from pathlib import Path

import numpy as np
import torch

from mindspeed_llm.data.context_split import ContextSplit


def real_lengths(longest: int) -> np.ndarray:
    """Return the lengths in tokens of about 4 bytes, cut at the longest."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for pattern in ("*.py", "[a-r]*/*.py") for path in sorted(folder.glob(pattern))]
    lengths = np.array([path.stat().st_size // 4 for path in files])
    return np.clip(lengths[lengths > 0], 1, longest)


def num_pairs(bounds: list[int], split: ContextSplit) -> int:
    """Return how many keys the queries of a rank see, in documents with these bounds."""
    rows = split.source_rows(bounds)
    rows = rows[rows >= 0]
    document = torch.searchsorted(torch.tensor(bounds), rows, right=True) - 1
    return int((rows - torch.tensor(bounds)[document] + 1).sum())
