"""Lengths of documents as they are found, the files of a standard library, and their attention."""

import numpy as np
import torch

from mindspeed_llm.data.context_split import ContextSplit
from tests.commands import ROOT

RECORDED = ROOT / "tests/assets/document_lengths.txt"
"""Tokens of about 4 bytes in each file of Python 3.11.7's own: other releases have others."""


def real_lengths(longest: int) -> np.ndarray:
    """Return the lengths in tokens, cut at the longest."""
    return np.minimum(np.array(RECORDED.read_text().split(), int), longest)


def num_pairs(bounds: list[int], split: ContextSplit) -> int:
    """Return how many keys the queries of a rank see, in documents with these bounds."""
    rows = split.source_rows(bounds)
    rows = rows[rows >= 0]
    document = torch.searchsorted(torch.tensor(bounds), rows, right=True) - 1
    return int((rows - torch.tensor(bounds)[document] + 1).sum())
