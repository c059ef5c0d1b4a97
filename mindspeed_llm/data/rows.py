"""Packed rows: written from the samples that an earlier step left in the work folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mindspeed_llm.data.indexed import Array, TokenWriter
from mindspeed_llm.data.packing import plan_rows
from mindspeed_llm.data.samples import IGNORED

ROWS_AT_ONCE = 256


def write_rows(
    folder: Path,
    samples: dict[str, TokenWriter],
    *,
    capacity: int,
    pad_id: int,
    neat: bool,
) -> tuple[dict[str, TokenWriter], int]:
    """Fill rows of `capacity` tokens with samples; return their writers and how many there are.

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
    filling = {"input_ids": pad_id, "labels": IGNORED, "attention_mask": 0 if neat else 1}
    writers = {}
    for key, writer in samples.items():
        writers[key] = TokenWriter(folder, f"rows_{key}", writer.dtype)
        writers[key].cut({})
        for place in range(0, len(rows), ROWS_AT_ONCE):
            group = rows[place : place + ROWS_AT_ONCE]
            block = np.full((len(group), capacity), filling[key], writer.dtype)
            for row, members in zip(block, group):
                _fill(row, members, stored[key], starts, key == "attention_mask" and neat)
            writers[key].append(block.reshape(-1), np.full(len(group), capacity))
    return writers, len(rows)


def _fill(row: Array, members: list[int], tokens: Array, starts: Array, count: bool) -> None:
    place = 0
    for number, member in enumerate(members, 1):
        start, end = starts[member], starts[member + 1]
        row[place : place + end - start] = number if count else tokens[start:end]
        place += end - start
