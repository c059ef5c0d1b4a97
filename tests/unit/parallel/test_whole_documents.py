"""Documents that stay whole: ranks have equal rows and attention, and few documents are cut."""

import random
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.parallel.context.blocks import Spans, shared_and_whole
from mindspeed.parallel.context.layout import Layout
from mindspeed.parallel.context.whole_documents import whole_documents
from tests.unit.mindspeed_llm.data.real_lengths import real_lengths

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=20)


def pieces(layout, bounds):
    """Return the rows of each document that each rank holds, as ranges inside the document."""
    return [
        [
            [(max(first, start) - start, min(last, end) - start) for first, last in ranges]
            for start, end in pairwise(bounds)
        ]
        for ranges in layout.ranges
    ]


def works(layout, bounds):
    """Return how many keys the queries of each rank see: row i of a document sees i + 1."""
    return [
        sum((a + 1 + b) * (b - a) // 2 for document in rank for a, b in document if a < b)
        for rank in pieces(layout, bounds)
    ]


def num_shares(layout, bounds):
    """Count each rank's documents."""
    return sum(any(a < b for a, b in one) for rank in pieces(layout, bounds) for one in rank)


@given(LENGTHS, st.integers(1, 9))
def test_rows_are_equal_and_few_documents_are_cut(lengths, size):
    bounds = [0, *accumulate(lengths)]
    layout = whole_documents(bounds, size)
    rows = sorted(row for ranges in layout.ranges for one in ranges for row in range(*one))
    assert rows == list(range(bounds[-1]))
    counts = [layout.num_rows(rank) for rank in range(size)]
    assert max(counts) - min(counts) <= 1
    # Each rank but the last cuts one document of either end of the line.
    assert num_shares(layout, bounds) <= sum(n > 0 for n in lengths) + 2 * (size - 1)
    held = shared_and_whole(Spans.packed(bounds), layout)
    assert sum(part.layout.num_rows(r) for part in held for r in range(size)) == bounds[-1]


def drawn(tokens, draw):
    """Draw lengths whose logarithms are normal, as those of long-context text are."""
    bounds = [0]
    while bounds[-1] < tokens:
        length = int(min(max(draw.lognormvariate(8.3, 1.2), 64), tokens))
        bounds.append(min(bounds[-1] + length, tokens))
    return bounds


def found(tokens, draw):
    """Draw documents as they are found in Python's library."""
    lengths = [int(n) for n in draw.choices(real_lengths(tokens), k=tokens)]
    bounds = [0, *accumulate(lengths)]
    return [*(one for one in bounds if one < tokens), tokens]


@pytest.mark.parametrize("make", [drawn, found])
@given(st.integers(0, 10**6), st.sampled_from([2, 3, 4, 8]), st.sampled_from([8192, 65536]))
def test_attention_is_balanced(make, seed, size, tokens):
    bounds = make(tokens, random.Random(seed))
    work = works(whole_documents(bounds, size), bounds)
    assert max(work) <= 1.1 * min(work)


def test_documents_that_fit_are_not_cut():
    assert whole_documents([0, 10, 20, 30, 40], 4).ranges == (
        ((30, 40),),
        ((20, 30),),
        ((10, 20),),
        ((0, 10),),
    )
    # Two of 8 and four of 4: one of 8 and two of 4 for each rank.
    layout = whole_documents([0, 8, 16, 20, 24, 28, 32], 2)
    assert num_shares(layout, [0, 8, 16, 20, 24, 28, 32]) == 6


@given(st.integers(1, 50), st.integers(1, 16))
def test_one_document_is_split_in_zigzag_order(half, size):
    length = 2 * half * size  # as Megatron needs it
    layout, zigzag = whole_documents([0, length], size), Layout.zigzag(length, size)
    for rank in range(size):
        assert torch.equal(layout.index(rank), zigzag.index(rank))


def test_a_long_document_is_shared_by_the_ranks_that_must():
    """Half of the rows are one document: with four ranks none can have it alone."""
    bounds = [0, 512, *range(512 + 64, 1024 + 1, 64)]
    layout = whole_documents(bounds, 4)
    assert [layout.num_rows(rank) for rank in range(4)] == [256] * 4
    work = works(layout, bounds)
    assert max(work) <= 1.03 * min(work)
    zigzag = Layout.zigzag_documents(bounds, 4)
    assert num_shares(layout, bounds) <= 9 + 6 and num_shares(zigzag, bounds) == 36
