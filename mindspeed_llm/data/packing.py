"""Sample packing: assign samples to rows, the longest that still fits first, and write the rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindspeed_llm.data.indexed import IGNORE_INDEX, Array, TokenWriter


def plan_rows(lengths: Sequence[int] | Array, capacity: int) -> list[list[int]]:
    """Pack samples into rows of `capacity` tokens, greedily; every sample must fit a row.

    A row takes the longest remaining sample, then again the longest that fits in the rest. Finding
    it is cheap: `nearest[n]` leads to the longest length up to n of which a sample remains.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.size and not 0 < sizes.min() <= sizes.max() <= capacity:
        raise ValueError(f"samples must have 1 to {capacity} tokens")
    order = np.argsort(-sizes, kind="stable")
    counts = np.bincount(sizes, minlength=capacity + 1)
    # The samples of length n are order[starts[n] : starts[n] + counts[n]], in their original order.
    starts = len(sizes) - np.cumsum(counts)
    remaining, taken = counts.tolist(), starts.tolist()
    nearest = list(range(capacity + 1))

    def longest(free: int) -> int:
        """Return the longest remaining length up to `free`, 0 without one."""
        found = free
        while found and not (nearest[found] == found and remaining[found]):
            found = nearest[found] if nearest[found] != found else found - 1
        while free != found:  # compress the path for the next search
            nearest[free], free = found, nearest[free] if nearest[free] != free else free - 1
        return found

    rows: list[list[int]] = []
    while size := longest(capacity):
        row, free = [], capacity
        while size:
            row.append(int(order[taken[size]]))
            taken[size] += 1
            remaining[size] -= 1
            free -= size
            size = longest(free)
        rows.append(row)
    return rows


ROWS_AT_ONCE = 256


def write_rows(
    folder: Path,
    samples: dict[str, TokenWriter],
    *,
    capacity: int,
    pad_id: int,
    neat: bool,
) -> tuple[dict[str, TokenWriter], int]:
    """Fill rows of `capacity` tokens with samples; return their writers and the number of rows.

    The attention mask of neat rows counts the samples 1, 2, ... and is 0 on padding; that of plain
    rows is 1 throughout.
    """
    for writer in samples.values():
        writer.sizes()
        writer.close()
    stored = {key: np.memmap(w.data_path, w.dtype, "r") for key, w in samples.items()}
    first = next(iter(samples.values()))
    lengths = np.fromfile(first.lengths_path, "<i4")
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    rows = plan_rows(lengths, capacity)
    filling = {"input_ids": pad_id, "labels": IGNORE_INDEX, "attention_mask": 0 if neat else 1}
    writers = {}
    for key, writer in samples.items():
        writers[key] = TokenWriter(folder, f"rows_{key}", writer.dtype)
        writers[key].truncate({})
        for first_row in range(0, len(rows), ROWS_AT_ONCE):
            group = rows[first_row : first_row + ROWS_AT_ONCE]
            block = np.full((len(group), capacity), filling[key], writer.dtype)
            for row, members in zip(block, group):
                _fill(row, members, stored[key], starts, key == "attention_mask" and neat)
            writers[key].append(block.reshape(-1), np.full(len(group), capacity))
    return writers, len(rows)


def _fill(row: Array, members: list[int], tokens: Array, starts: Array, count: bool) -> None:
    position = 0
    for number, member in enumerate(members, 1):
        start, end = starts[member], starts[member + 1]
        row[position : position + end - start] = number if count else tokens[start:end]
        position += end - start
