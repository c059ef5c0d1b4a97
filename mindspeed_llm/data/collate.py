"""Collate samples into the tensors of a micro-batch, without a mask of size s x s: causal attention
needs none for padding on the right, and `cu_seqlens` separates packed samples.

Shapes: (B, S), or (1, B * S) for packed rows. `labels` are shifted by one, as Megatron expects;
where nothing is trained `loss_mask` is 0 and the label 0. Which rows have a label is found here, on
the host, and part of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mindspeed.config import ConfigError
from mindspeed.ops.linear_cross_entropy.labelled_rows import LabelledRows
from mindspeed_llm.data.indexed import IGNORE_INDEX, Array

Batch = dict[str, torch.Tensor]
Samples = Sequence[Mapping[str, Array]]
LABELLED_ROWS, NUM_LABELLED_ROWS = "labelled_rows", "num_labelled_rows"


def collate_fixed(samples: Samples, *, seq_length: int, pad_id: int, shift: bool = True) -> Batch:
    """Pad every sample to `seq_length`; a longer one is an error."""
    return _padded(samples, seq_length, pad_id, shift)


def collate_variable(
    samples: Samples,
    *,
    multiple: int = 8,
    limit: int | None = None,
    pad_id: int,
    shift: bool = True,
) -> Batch:
    """Pad to the longest sample of the micro-batch, rounded up to a multiple (at most `limit`)."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    length = -(-longest // multiple) * multiple
    return _padded(samples, min(length, limit) if limit else length, pad_id, shift)


def collate_packed(
    samples: Samples,
    *,
    eos_id: int | None = None,
    multiple: int = 1,
    pad_id: int = 0,
    shift: bool = True,
) -> Batch:
    """Concatenate rows; `cu_seqlens` are the boundaries of samples, `max_seqlen` the longest.

    Samples are separated by the attention mask of neat rows, which counts them; with `eos_id` by
    the end-of-text tokens instead (rows of plain packing). Padding, also that to a multiple of
    `multiple` tokens, is a sample of its own. Labels that are not shifted are taken as they are.
    """
    padding = -sum(len(sample["input_ids"]) for sample in samples) % multiple
    tail, ignored = np.full(padding, pad_id), np.full(padding, IGNORE_INDEX)
    ids = np.concatenate([*(sample["input_ids"] for sample in samples), tail]).astype(np.int64)
    labels = np.concatenate([*(sample["labels"] for sample in samples), ignored]).astype(np.int64)
    starts, offset = [], 0
    for sample in samples:
        starts.append(_starts(sample, eos_id) + offset)
        offset += len(sample["input_ids"])
    sample_starts = np.concatenate([*starts, [offset]] if padding else starts)
    boundaries = np.append(sample_starts, len(ids))
    positions = np.arange(len(ids)) - np.repeat(sample_starts, np.diff(boundaries))
    targets = labels
    if shift:
        targets = np.append(labels[1:], IGNORE_INDEX)
        # The last token of a sample is not followed by the next.
        targets[boundaries[1:] - 1] = IGNORE_INDEX
    batch = _tensors(ids[None], targets[None], positions[None])
    batch["cu_seqlens"] = torch.from_numpy(boundaries.astype(np.int32))
    batch["max_seqlen"] = torch.tensor(int(np.diff(boundaries).max()), dtype=torch.int32)
    return batch


def with_labelled_rows(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add the rows in the loss mask to a micro-batch on the host, unless nearly all are."""
    rows = LabelledRows.of(batch["loss_mask"]) if "loss_mask" in batch else None
    if rows is None:
        return dict(batch)
    return {**batch, LABELLED_ROWS: rows.index, NUM_LABELLED_ROWS: torch.tensor(rows.count)}


def labelled_rows(batch: Mapping[str, torch.Tensor]) -> LabelledRows | None:
    """Return what with_labelled_rows has added."""
    if LABELLED_ROWS not in batch:
        return None
    return LabelledRows(batch[LABELLED_ROWS], int(batch[NUM_LABELLED_ROWS]))


def split_pairs(samples: Samples) -> list[dict[str, Array]]:
    """Return the sequences of pairs: the chosen completions first, then the rejected, in order."""
    return [
        {"input_ids": sample[f"{side}_input_ids"], "labels": sample[f"{side}_labels"]}
        for side in ("chosen", "rejected")
        for sample in samples
    ]


def _padded(samples: Samples, length: int, pad_id: int, shift: bool) -> Batch:
    ids = np.full((len(samples), length), pad_id, np.int64)
    targets = np.full((len(samples), length), IGNORE_INDEX, np.int64)
    for number, sample in enumerate(samples):
        size = len(sample["input_ids"])
        if size > length:
            raise ConfigError(
                f"a sample has {size} tokens, more than the {length} of a row: preprocess with "
                f"--seq-length {length}, or train with a longer one"
            )
        ids[number, :size] = sample["input_ids"]
        if shift:
            targets[number, : size - 1] = sample["labels"][1:]
        else:
            targets[number, :size] = sample["labels"]
    positions = np.broadcast_to(np.arange(length), ids.shape)
    return _tensors(ids, targets, positions)


def _tensors(ids: Array, targets: Array, positions: Array) -> Batch:
    trained = targets != IGNORE_INDEX
    return {
        "tokens": torch.from_numpy(np.ascontiguousarray(ids)),
        "labels": torch.from_numpy(np.where(trained, targets, 0)),
        "loss_mask": torch.from_numpy(trained.astype(np.float32)),
        "position_ids": torch.from_numpy(np.array(positions, np.int64)),
    }


def _starts(row: Mapping[str, Array], eos_id: int | None) -> Array:
    """Return the start of each sample of a row."""
    if eos_id is None and "attention_mask" not in row:  # of a pair, which is not packed
        return np.zeros(1, np.int64)
    if eos_id is None:
        changes = np.flatnonzero(np.diff(row["attention_mask"])) + 1
        return np.concatenate(([0], changes))
    ends = np.flatnonzero(np.asarray(row["input_ids"]) == eos_id) + 1
    return np.concatenate(([0], ends[ends < len(row["input_ids"])]))
