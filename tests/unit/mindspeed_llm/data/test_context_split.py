"""The rows of a micro-batch that each context-parallel rank holds."""

import logging
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.ops.rotary_position_embedding.packed import packed_positions
from mindspeed.parallel.context.blocks import CAUSAL, Spans, plan
from mindspeed.te.pytorch.attention.megatron import _positions as whole_positions
from mindspeed_llm.data.collate import collate_fixed, collate_packed
from mindspeed_llm.data.context_split import ContextSplit, PaddingWatch
from mindspeed_llm.tasks.posttrain.rows import Rows
from tests.unit.mindspeed_llm.data.real_lengths import num_pairs


def samples(lengths):
    """Return samples whose tokens count up over all of them."""
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    return [
        {
            "input_ids": np.arange(start, end) + 1,
            "labels": np.arange(start, end) + 1,
            "attention_mask": np.ones(end - start, int),
        }
        for start, end in pairwise(bounds)
    ]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    size=st.integers(2, 8),
    tp=st.integers(1, 4),
    layout=st.sampled_from(["zigzag", "whole"]),
)
def test_every_token_is_on_one_rank_where_rotary_embeddings_expect_it(lengths, size, tp, layout):
    batch = collate_packed(samples(lengths))
    shares = [ContextSplit(size, rank, tp, layout).split(batch) for rank in range(size)]
    kept = torch.cat([share["tokens"][share["tokens"] > 0] for share in shares])
    assert kept.sort().values.tolist() == list(range(1, sum(lengths) + 1))
    for rank, share in enumerate(shares):
        tokens, padded = share["tokens"], share["cu_seqlens_padded"]
        assert tokens.numel() * size == padded[-1] and tokens.numel() % tp == 0
        assert share["max_seqlen"] == max(padded.diff())
        if layout == "zigzag":
            assert (padded.diff() % (2 * size) == 0).all()
            positions = packed_positions(tokens[0], padded, size, rank)
        else:
            assert padded[-1] < sum(lengths) + size * math.lcm(2, tp)
            positions = whole_positions(tuple(padded.tolist()), size, rank, tokens.device)
        assert torch.equal(share["position_ids"][tokens > 0], positions[tokens[0] > 0])
        trained = share["loss_mask"] > 0
        assert torch.equal(share["labels"][trained], share["tokens"][trained] + 1)
        assert share["trained_tokens"] == sum(lengths) - len(lengths)
        if layout == "zigzag":
            local = padded.diff() // size
        else:  # the last document has the padding
            document = torch.bucketize(tokens[tokens > 0], batch["cu_seqlens"])
            local = torch.bincount(document, minlength=len(lengths) + 1)[1:]
            local[-1] += (tokens == 0).sum()
        assert torch.equal(share["local_lengths"], local.long())
    assert sum(share["loss_mask"].sum() for share in shares) == sum(lengths) - len(lengths)


def test_rows_are_cut_as_megatron_cuts_them():
    batch = collate_fixed(samples([13, 16]), seq_length=16, pad_id=0)
    pieces = batch["tokens"].view(2, 8, 2)
    for rank in range(4):
        share = ContextSplit(4, rank).split(batch)["tokens"]
        assert torch.equal(share, pieces[:, [rank, 7 - rank]].flatten(1))


def test_rows_that_do_not_divide_are_padded():
    batch = collate_fixed(samples([13]), seq_length=13, pad_id=0)
    split = ContextSplit(2, 0, 3)
    assert split.padded(13) == 24
    share = split.split(batch)
    assert share["tokens"].tolist() == [[1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0]]
    assert share["loss_mask"].sum() == 6 and share["trained_tokens"] == 12
    assert ContextSplit().split(batch).keys() == batch.keys()


def test_much_padding_is_reported_once(caplog):
    split = ContextSplit(4, 1, document_layout="zigzag")
    watch = PaddingWatch(split)
    full = collate_packed(samples([32, 24])) | {"real_tokens": torch.tensor(56)}
    short = collate_packed(samples([9, 17])) | {"real_tokens": torch.tensor(26)}
    with caplog.at_level(logging.WARNING):
        watch.watch(split.split(full))
        assert not caplog.records
        watch.watch(split.split(short))
        watch.watch(split.split(short))
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "35% of the 40 tokens of a packed batch are padding; --context-parallel-size 4 pads each "
        "document to a multiple of 8"
    )


def test_padding_that_routers_count_is_reported_of_any_rows(caplog):
    rows = Rows(length=16, multiple=1, pad_id=0, kind="fixed")
    batch = rows.collate(samples([9, 11]))
    with caplog.at_level(logging.WARNING):
        PaddingWatch(ContextSplit()).watch(batch)
        PaddingWatch(ContextSplit(), is_routed=True).watch({"tokens": batch["tokens"]})
        assert not caplog.records
        PaddingWatch(ContextSplit(), is_routed=True).watch(batch)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "38% of the 32 tokens of a batch are padding; routers send it to experts, and count it in "
        "loads, losses and biases: give --variable-seq-lengths"
    )


def test_padding_that_cannot_be_joined_away_is_not_answered_by_joining(caplog):
    rows = Rows(length=16, multiple=1, pad_id=0, kind="fixed")
    with caplog.at_level(logging.WARNING):
        watch = PaddingWatch(ContextSplit(), is_routed=True, is_shortest=True)
        watch.watch(rows.collate(samples([9, 11])))
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "and biases: rows hold one sample each: use samples of similar lengths, and a --seq-length "
        "that is not above the longest"
    )


@pytest.mark.parametrize(
    ("may_pack", "is_packed", "advice"),
    [
        (True, False, "variable-seq-lengths or a smaller --seq-length, or fill rows by "),
        (False, False, "variable-seq-lengths or a smaller --seq-length"),
        (True, True, "larger --micro-batch-size where training joins samples, or fill rows by "),
        (False, True, "larger --micro-batch-size"),  # --pack is refused for preference pairs
    ],
)
def test_what_is_refused_is_not_advised(caplog, may_pack, is_packed, advice):
    kind = "concatenated" if is_packed else "fixed"
    batch = Rows(length=16, multiple=64, pad_id=0, kind=kind).collate(samples([9, 11]))
    with caplog.at_level(logging.WARNING):
        PaddingWatch(ContextSplit(), is_routed=True, may_pack=may_pack).watch(batch)
    (record,) = caplog.records
    _, _, given = record.getMessage().rpartition(": give ")
    assert advice in given and given.endswith("(--pack --neat-pack)") == may_pack


def test_padding_is_that_of_rows_with_shared_prompts(caplog):
    """Nine rows of 16: whole sequences have 15 tokens, but the six of the prompt are there once."""
    ids, labels = np.arange(1, 9), np.array([-100] * 7 + [8])
    pair = {"chosen_input_ids": ids, "chosen_labels": labels}
    pair |= {"rejected_input_ids": ids[:7], "rejected_labels": labels[:7]}
    rows = Rows(length=16, multiple=16, pad_id=0, kind="fixed")
    with caplog.at_level(logging.WARNING):
        PaddingWatch(ContextSplit()).watch(rows.collate_pairs([pair], is_shared=True))
    (record,) = caplog.records
    assert record.getMessage().startswith("44% of the 16 tokens of a packed batch are padding")


def test_ranks_share_the_pairs_of_tokens_that_attention_computes():
    bounds, split = [0, 700, 701, 1500], ContextSplit(4)
    layout, spans = split.layout(bounds), Spans.packed(bounds, split.padded_bounds(bounds))
    for rank, ranges in enumerate(layout.ranges):
        calls = plan(spans, ranges, layout.covered, CAUSAL, False)
        visible = sum(_visible(block) for call in calls for block in call.blocks)
        assert visible == num_pairs(bounds, ContextSplit(4, rank))


def _visible(block):
    queries = np.arange(*block.q) - block.q[0] + block.q_start
    return int(np.clip(queries - block.k_start + 1, 0, block.k[1] - block.k[0]).sum())
