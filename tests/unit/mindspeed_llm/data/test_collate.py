"""Micro-batches: shifted labels, masks, positions and borders, against the plain definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.config import ConfigError
from mindspeed_llm.data.collate import (
    collate_fixed,
    collate_packed,
    collate_variable,
    split_pairs,
)
from mindspeed_llm.data.indexed import IGNORE_INDEX


def sample(ids, trained_from=1):
    ids = np.array(ids, np.int32)
    labels = np.where(np.arange(len(ids)) >= trained_from, ids, IGNORE_INDEX).astype(np.int32)
    return {"input_ids": ids, "labels": labels, "attention_mask": np.ones(len(ids), np.int32)}


def trained_pairs(batch):
    """Every (token, what must follow it) of a batch, in order."""
    mask = batch["loss_mask"].bool()
    return list(zip(batch["tokens"][mask].tolist(), batch["labels"][mask].tolist()))


def test_fixed_and_variable():
    samples = [sample([5, 6, 7], 2), sample([8, 9, 10, 11, 12], 1)]
    fixed = collate_fixed(samples, seq_length=8, pad_id=3)
    assert fixed["tokens"].tolist()[0] == [5, 6, 7, 3, 3, 3, 3, 3]
    assert fixed["labels"].tolist()[0] == [0, 7, 0, 0, 0, 0, 0, 0]
    assert fixed["loss_mask"].tolist()[0] == [0, 1, 0, 0, 0, 0, 0, 0]
    assert fixed["position_ids"].tolist() == [list(range(8))] * 2
    variable = collate_variable(samples, multiple=3, pad_id=3)
    assert variable["tokens"].shape == (2, 6)
    assert trained_pairs(variable) == trained_pairs(fixed)
    assert collate_variable(samples, multiple=8, limit=5, pad_id=3)["tokens"].shape == (2, 5)
    unshifted = collate_fixed(samples, seq_length=8, pad_id=3, shift=False)
    assert unshifted["labels"].tolist()[0][:3] == [0, 0, 7]
    with pytest.raises(ConfigError, match="a sample has 5 tokens, more than the 4"):
        collate_fixed(samples, seq_length=4, pad_id=3)


@pytest.mark.parametrize("multiple", [1, 4, 5, 8])
def test_joined_samples_are_the_padded_ones(multiple):
    samples = [sample([5, 6, 7], 2), sample([8, 9, 10, 11, 12], 1), sample([13, 14], 1)]
    joined = collate_packed(samples, multiple=multiple, pad_id=3)
    padded = collate_variable(samples, multiple=1, pad_id=3)
    assert trained_pairs(joined) == trained_pairs(padded)
    length = -(-10 // multiple) * multiple
    assert joined["tokens"].shape == (1, length)
    assert joined["tokens"][0, 10:].tolist() == [3] * (length - 10)
    tail = [length] if length > 10 else []
    assert joined["cu_seqlens"].tolist() == [0, 3, 8, 10, *tail]
    assert joined["max_seqlen"] == max(5, length - 10)
    positions = [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, *range(length - 10)]
    assert joined["position_ids"].tolist() == [positions]


def pack(samples, length):
    """One neat row, as preprocessing writes it."""
    ids = np.concatenate([s["input_ids"] for s in samples])
    labels = np.concatenate([s["labels"] for s in samples])
    mask = np.concatenate([np.full(len(s["input_ids"]), n) for n, s in enumerate(samples, 1)])
    padding = length - len(ids)
    return {
        "input_ids": np.pad(ids, (0, padding), constant_values=3),
        "labels": np.pad(labels, (0, padding), constant_values=IGNORE_INDEX),
        "attention_mask": np.pad(mask, (0, padding)),
    }


@given(
    rows=st.lists(
        st.lists(st.lists(st.integers(4, 99), min_size=1, max_size=6), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
    first=st.integers(0, 2),
)
def test_packed_rows_train_what_their_samples_train(rows, first):
    made = [[sample(ids, first) for ids in row] for row in rows]
    packed = collate_packed([pack(row, 20) for row in made])
    apart = [collate_variable([s], multiple=1, pad_id=3) for row in made for s in row]
    assert trained_pairs(packed) == [pair for batch in apart for pair in trained_pairs(batch)]
    assert packed["tokens"].shape == (1, 20 * len(rows))
    borders = packed["cu_seqlens"].tolist()
    assert borders[0] == 0 and borders[-1] == 20 * len(rows) and borders == sorted(set(borders))
    lengths = [size for row in rows for size in [*map(len, row), 20 - sum(map(len, row))] if size]
    assert np.diff(borders).tolist() == lengths
    assert packed["max_seqlen"].item() == max(lengths)
    positions = [position for size in lengths for position in range(size)]
    assert packed["position_ids"].tolist()[0] == positions


def test_plain_rows_are_split_at_the_end_of_text():
    row = {**sample([5, 2, 6, 7, 2, 8]), "attention_mask": np.ones(6, np.int32)}
    assert collate_packed([row])["cu_seqlens"].tolist() == [0, 6]
    assert collate_packed([row], eos_id=2)["cu_seqlens"].tolist() == [0, 2, 5, 6]


def test_a_plain_row_that_ends_with_the_end_of_text_has_no_empty_sample():
    rows = [sample([5, 2, 6, 2]), sample([2, 7, 8, 2])]
    batch = collate_packed(rows, eos_id=2)
    assert batch["cu_seqlens"].tolist() == [0, 2, 4, 5, 8]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 0, 0, 1, 2]]
    assert batch["max_seqlen"].item() == 3
    assert trained_pairs(batch) == [(5, 2), (6, 2), (7, 8), (8, 2)]


def test_pairs():
    pairs = [
        {
            f"{side}_{key}": values[key]
            for side, values in (("chosen", sample([n, 1])), ("rejected", sample([n, 2, 3])))
            for key in ("input_ids", "labels")
        }
        for n in (7, 8)
    ]
    batch = collate_variable(split_pairs(pairs), multiple=4, pad_id=0)
    assert batch["tokens"].tolist() == [[7, 1, 0, 0], [8, 1, 0, 0], [7, 2, 3, 0], [8, 2, 3, 0]]


def test_types():
    batch = collate_packed([pack([sample([4, 5])], 4)])
    kinds = {key: value.dtype for key, value in batch.items()}
    assert kinds == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
        "cu_seqlens": torch.int32,
        "max_seqlen": torch.int32,
    }
