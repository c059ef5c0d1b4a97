"""Pairs that hold their prompt once: every sequence is still there, with its labels."""

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mindspeed_llm.data.collate import collate_packed, split_pairs
from mindspeed_llm.data.shared_prompts import collate_shared_pairs, shared_length

IGNORED = -100
# Few ids, so that sequences often begin alike; any token may have a label.
SEQUENCE = st.lists(st.tuples(st.integers(1, 2), st.booleans()), min_size=1, max_size=8)
PAIR = st.tuples(SEQUENCE, SEQUENCE, SEQUENCE).map(lambda x: (x[0] + x[1], x[0] + x[2]))


def pair_of(chosen, rejected):
    """Return a pair of (id, has a label) as the data files have it."""
    pair = {}
    for side, tokens in (("chosen", chosen), ("rejected", rejected)):
        ids = np.array([one for one, _ in tokens], np.int32)
        pair[f"{side}_input_ids"] = ids
        pair[f"{side}_labels"] = np.where([known for _, known in tokens], ids, IGNORED)
    return pair


def common(chosen, rejected):
    """Count the tokens that both begin with and that are no label, but for the last."""
    count = 0
    for one, other in zip(chosen, rejected):
        if one != other or one[1]:
            break
        count += 1
    return max(count - 1, 0)


def keys_of(batch):
    """Return the row of each key, document by document."""
    source = torch.full_like(batch["key_row_ids"], -1)
    for row in range(batch["tokens"].numel()):
        mine = batch["key_row_ids"][batch["key_starts"][row] : batch["key_starts"][row + 1]]
        assert mine.tolist() == sorted(mine.tolist())  # gradients are added in this order
        source[mine.long()] = row
    assert source.min() >= 0
    return [source[a:b].long() for a, b in zip(*_ends(batch["cu_seqlens_kv"]))]


def _ends(bounds):
    return bounds[:-1].tolist(), bounds[1:].tolist()


def labels_of(batch, first):
    """Return (sequence, position, id) of all labels; documents begin at the rows of `first`."""
    found, places = [], batch["position_ids"][0].tolist()
    for row in batch["loss_mask"][0].nonzero().flatten().tolist():
        document = sum(start <= row for start in first) - 1
        found.append((document, places[row], int(batch["labels"][0, row])))
    return found


PLAIN = [(1, False)] * 3 + [(2, True)]


@given(st.lists(PAIR, min_size=1, max_size=4), st.sampled_from([1, 4]))
@example([(PLAIN, PLAIN)], 1)  # sequences that are the same, but for nothing
@example([(PLAIN, [(2, False), (1, True)])], 1)  # prompts that differ
@example([([(1, False), (2, True)], [(1, False), (1, True)])], 1)  # of one token
@example([([(1, False)] * 5, [(1, False)] * 3)], 4)  # no label, one the beginning of the other
def test_every_sequence_has_its_tokens_positions_and_labels(sides, multiple):
    pairs = [pair_of(*each) for each in sides]
    batch = collate_shared_pairs(pairs, multiple=multiple, pad_id=9)
    whole = collate_packed(split_pairs(pairs), multiple=multiple, pad_id=9)
    tokens, positions, keys = batch["tokens"][0], batch["position_ids"][0], keys_of(batch)
    sequences = split_pairs(pairs)
    for one, rows in zip(sequences, keys):
        assert tokens[rows].tolist() == one["input_ids"].tolist()
        assert positions[rows].tolist() == list(range(len(rows)))
    shared = [common(*each) for each in sides]
    starts, ends = _ends(batch["cu_seqlens"])
    for number, rows in enumerate(keys[: len(sequences)]):
        first = shared[number - len(sides)] if number >= len(sides) else 0
        assert rows[first:].tolist() == list(range(starts[number], ends[number]))
        if first:  # the prompt is that of the chosen one
            assert rows[:first].tolist() == keys[number - len(sides)][:first].tolist()
    assert all((tokens[rows] == 9).all() for rows in keys[len(sequences) :])
    used = sum(len(one["input_ids"]) for one in sequences) - sum(shared)
    assert len(tokens) == -(-used // multiple) * multiple
    assert batch["max_seqlen"] == whole["max_seqlen"] or len(keys) > len(sequences)
    assert batch["max_seqlen"] == max(len(rows) for rows in keys)
    assert labels_of(batch, starts) == labels_of(whole, _ends(whole["cu_seqlens"])[0])


def test_labels_of_either_side_are_not_shared():
    prompt, labelled = [(1, False)] * 4, [(1, False)] * 3 + [(1, True)]
    for chosen, rejected, expected in (
        (prompt + [(1, True)], prompt + [(2, True)], 3),
        (labelled, prompt + [(2, True)], 2),
        (prompt + [(1, True)], labelled, 2),
    ):
        pair = pair_of(chosen, rejected)
        assert shared_length(*split_pairs([pair])) == expected


def test_types():
    kinds = {key: x.dtype for key, x in collate_shared_pairs([pair_of(PLAIN, PLAIN)]).items()}
    assert kinds == dict.fromkeys(("tokens", "labels", "position_ids"), torch.int64) | {
        "loss_mask": torch.float32,
        **dict.fromkeys(("cu_seqlens", "cu_seqlens_kv", "max_seqlen"), torch.int32),
        **dict.fromkeys(("key_row_ids", "key_starts"), torch.int32),
    }
