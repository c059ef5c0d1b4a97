"""Token ids checked against a vocabulary: one pass over a file, a tenth of a second a gigabyte."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_llm.data.indexed import Array
from mindspeed_llm.data.samples import IGNORED

BLOCK = 1 << 18
"""Tokens looked at in one go: they stay in a cache of the processor."""


class TokenFile(NamedTuple):
    """A file of token ids, or of labels, which may be IGNORED too."""

    path: Path
    dtype: np.dtype[Any]
    is_labels: bool = False


def find_outside(
    file: TokenFile, vocabulary: int, share: tuple[int, int] = (0, 1)
) -> tuple[int, int] | None:
    """Return the place and the value of a token that is none of 0 .. vocabulary - 1, else None.

    `share` is (number, count): of that many equal parts of the file only one is looked at.
    """
    if not file.path.stat().st_size:
        return None
    tokens = np.memmap(file.path, file.dtype, "r")
    number, count = share
    first, last = (len(tokens) * part // count for part in (number, number + 1))
    for start in range(first, last, BLOCK):
        block = tokens[start : min(start + BLOCK, last)]
        if _is_suspect(block, vocabulary, file.is_labels):
            wrong = (block < 0) | (block >= vocabulary)
            if file.is_labels:
                wrong &= block != IGNORED
            if wrong.any():
                place = int(wrong.argmax())
                return start + place, int(block[place])
    return None


def _is_suspect(block: Array, vocabulary: int, is_labels: bool) -> bool:
    """Tell whether a block may hold a wrong token; ids below 0 are large without their sign."""
    ids = block.view(f"<u{block.dtype.itemsize}")
    if not is_labels:
        return bool(ids.max() >= vocabulary)
    # IGNORED becomes 0, what lies between it and 0 becomes 1 to 99, a token 100 or more.
    ids = ids + ids.dtype.type(-IGNORED)
    between = ids - ids.dtype.type(1) < -IGNORED - 1
    return bool(ids.max() >= vocabulary - IGNORED or between.any())
