"""Layouts and kernel calls of context parallelism, for any documents."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.parallel.context.blocks import (
    CAUSAL,
    FULL,
    Call,
    Spans,
    plan,
    shared_and_whole,
)
from mindspeed.parallel.context.layout import Layout, partitioned_indices, split
from mindspeed.parallel.context.ring import Schedule
from mindspeed.parallel.context.whole_documents import whole_documents

LENGTHS = st.lists(
    st.tuples(st.integers(0, 13), st.sampled_from([0, 0, 1, 4])), min_size=1, max_size=5
)
WINDOWS = st.sampled_from([FULL, CAUSAL, (0, 0), (3, 0), (2, 2), (5, -1), (1, 3)])
LAYOUTS = st.sampled_from(["documents", "whole documents", "whole", "contiguous"])


def make(lengths, kind, size):
    """Return the documents, and a layout of the rows with padding."""
    bounds = [0, *itertools.accumulate(n for n, _ in lengths)]
    padded = [0, *itertools.accumulate(n + padding for n, padding in lengths)]
    if kind == "documents":
        return Spans.packed(bounds, padded), Layout.zigzag_documents(padded, size)
    if kind == "whole documents":
        return Spans.packed(bounds, padded), whole_documents(padded, size)
    make_layout = Layout.zigzag if kind == "whole" else Layout.contiguous
    return Spans.packed(bounds, padded), make_layout(padded[-1], size)


def is_visible(query, key, window):
    left, right = window
    return (left < 0 or key >= query - left) and (right < 0 or key <= query + right)


def pairs(call, q_rows, k_rows):
    """Yield the positions of all (query, key) pairs that a call computes."""
    for block in call.blocks:
        num_q, num_k = block.q[1] - block.q[0], block.k[1] - block.k[0]
        for i in range(num_q):
            at = i + num_k - num_q  # kernels align the last query to the last key
            keys = [j for j in range(num_k) if is_visible(at, j, block.window)]
            assert keys, "a kernel would divide by zero"
            yield from ((q_rows[block.q[0] + i], k_rows[block.k[0] + j]) for j in keys)


def keys_of_ring(spans, layout, rank):
    """Return what a rank attends to: its own rows, then those that other ranks send."""
    shared, _ = shared_and_whole(spans, layout)
    others = [one for source, one in enumerate(shared.layout.ranges) if source != rank]
    return [layout.ranges[rank], *others]


def keys_of_gather(spans, layout, rank):
    """Return what a rank attends to: documents that it holds alone, then the gathered ones."""
    shared, whole = shared_and_whole(spans, layout)
    return [whole.layout.ranges[rank], shared.layout.covered]


KEYS = st.sampled_from([keys_of_ring, keys_of_gather])


@given(LENGTHS, LAYOUTS, st.integers(1, 8), WINDOWS, st.booleans(), KEYS)
def test_every_visible_pair_is_computed_once(lengths, kind, size, window, is_joined, keys_of):
    spans, layout = make(lengths, kind, size)
    found = []
    steps = [
        (mine, theirs)
        for rank, mine in enumerate(layout.ranges)
        for theirs in keys_of(spans, layout, rank)
    ]
    for mine, theirs in steps:
        q_rows, k_rows = (
            [row for one in ranges for row in range(*one)] for ranges in (mine, theirs)
        )
        for call in plan(spans, mine, theirs, window, is_joined):
            found += pairs(call, q_rows, k_rows)
            queries = [row for one in call.q for row in range(*one)]
            assert len(set(queries)) == len(queries)
    documents = [range(*span) for span in spans.ranges]
    want = [(q, k) for rows in documents for q in rows for k in rows if is_visible(q, k, window)]
    assert sorted(found) == want


@given(LENGTHS, LAYOUTS, st.integers(1, 8))
def test_ranks_hold_every_row_once(lengths, kind, size):
    _, layout = make(lengths, kind, size)
    length = sum(n + padding for n, padding in lengths)
    x = torch.arange(length)
    shards = [layout.shard(x, rank) for rank in range(size)]
    assert torch.equal(layout.unshard(torch.cat(shards)), x)
    assert [len(shard) for shard in shards] == [layout.num_rows(rank) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_zigzag_is_megatrons_and_balanced(size):
    length = 8 * size
    layout = Layout.zigzag(length, size)
    pieces = torch.arange(length).view(2 * size, -1)
    for rank in range(size):
        want = pieces[[rank, 2 * size - 1 - rank]].flatten()
        assert torch.equal(layout.index(rank), want)
        # Own keys in one causal call; any other rank's in one full call of half the size.
        calls = [
            plan(Spans.whole(length), layout.ranges[rank], other, CAUSAL) for other in layout.ranges
        ]
        assert all(len(one) == len(one[0].blocks) == 1 for one in calls)
        work = [(one[0].window, _area(one[0])) for one in calls]
        assert work.pop(rank) == (CAUSAL, 64) and set(work) == {(FULL, 32)}


def _area(call: Call) -> int:
    ((q_start, q_end),), ((k_start, k_end),) = call.q, call.k
    return (q_end - q_start) * (k_end - k_start)


def test_packed_documents_are_one_call():
    bounds = [0, 8, 24, 40]
    layout = Layout.zigzag_documents(bounds, 2)
    for mine, theirs in itertools.product(layout.ranges, repeat=2):
        (call,) = plan(Spans.packed(bounds), mine, theirs, CAUSAL)
        assert len(call.blocks) == 3


def test_partitioned_indices_are_those_of_transformer_engine():
    cu_seqlens = torch.tensor([0, 4, 12], dtype=torch.int32)
    assert partitioned_indices(cu_seqlens, 12, 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert partitioned_indices(cu_seqlens, 12, 2, 1).tolist() == [1, 2, 6, 7, 8, 9]
    assert partitioned_indices(cu_seqlens, 16, 2, 1).tolist() == [1, 2, 6, 7, 8, 9, 13, 14]


def test_split_gives_the_remainder_to_the_first():
    assert split((0, 1021), 4) == [(0, 256), (256, 511), (511, 766), (766, 1021)]
    assert split((3, 5), 3) == [(3, 4), (4, 5), (5, 5)]


@given(st.integers(1, 12), st.data())
def test_schedules_bring_all_keys_to_all_ranks(size, data):
    window = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    schedule = Schedule(size, window)
    fed = [step for one in range(size) for step in schedule.fed_from(one)]
    assert sorted(fed) == list(range(1, size))
    for rank in range(size):
        sources = [schedule.source(rank, step) for step in range(size)]
        assert sorted(sources) == list(range(size)) and sources[0] == rank
        for step, source in enumerate(sources):
            assert schedule.holder(source, step) == rank
        assert schedule.holder(rank, size) == schedule.source(rank, size) == rank


def test_a_double_ring_crosses_windows_once_in_a_window():
    schedule = Schedule(8, 4)
    steps = [(schedule.source(5, step)) for step in range(8)]
    assert steps == [5, 4, 7, 6, 1, 0, 3, 2]
    assert schedule.fed_from(0) == [1, 4]
