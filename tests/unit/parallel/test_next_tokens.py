"""Tokens of one step on: those of the same document, on one rank and on several."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed.parallel.context.next_tokens import wrap_roll_tensor
from mindspeed.parallel.context.whole_documents import DOCUMENT_LAYOUTS
from tests.ranks import run_ranks

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)
CUT = {"whole": (5, 8, 2, 1, 16), "zigzag": (4, 8, 20)}
"""Lengths of which every rank has equally many rows."""


def roll_tensor(tensor, shifts=-1, dims=-1, cp_group=None, packed_seq_params=None):
    """One document a row on one rank."""
    assert (shifts, dims, cp_group, packed_seq_params) == (-1, -1, None, None)
    rolled = torch.cat([tensor[..., 1:], torch.zeros_like(tensor[..., :1])], dim=-1)
    return rolled, rolled.sum()


def packed(lengths):
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)


def by_document(tensor, lengths, padding=0):
    """Roll one document after the other, and the rows behind the last one as another."""
    bounds = [0, *accumulate([*lengths, padding])]
    return torch.cat([roll_tensor(tensor[..., a:b])[0] for a, b in pairwise(bounds) if a < b], -1)


@given(LENGTHS, st.integers(0, 3))
def test_a_document_ends_where_the_next_begins(lengths, padding):
    tensor = torch.arange(1, 2 * (sum(lengths) + padding) + 1).view(2, -1)
    rolled, total = wrap_roll_tensor(roll_tensor)(tensor, packed_seq_params=packed(lengths))
    assert rolled.equal(expected := by_document(tensor, lengths, padding))
    assert total == max(1, expected.sum())


def test_a_row_without_labels_divides_its_loss_by_one():
    none = torch.zeros(2, 4)
    assert wrap_roll_tensor(roll_tensor)(none)[1] == 1
    assert wrap_roll_tensor(roll_tensor)(none, packed_seq_params=packed([1, 3]))[1] == 1


def test_a_row_without_documents_is_left_to_megatron():
    tensor = torch.arange(1, 9).view(2, -1)
    assert wrap_roll_tensor(roll_tensor)(tensor, -1, -1)[0].equal(roll_tensor(tensor)[0])


def parts(layout):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    lengths = CUT[layout]
    tensor = torch.arange(1, 2 * sum(lengths) + 1).view(2, -1)
    documents = DOCUMENT_LAYOUTS[layout]([0, *accumulate(lengths)], size)
    roll = wrap_roll_tensor(wrap_roll_tensor(roll_tensor, layout))
    group = torch.distributed.group.WORLD
    mine = documents.shard(tensor, rank, dim=-1)
    rolled, total = roll(mine, cp_group=group, packed_seq_params=packed(lengths))
    expected = by_document(tensor, lengths)
    _, none = roll(mine * 0, cp_group=group, packed_seq_params=packed(lengths))
    is_right = rolled.equal(documents.shard(expected, rank, dim=-1))
    return is_right, total * size == expected.sum(), none * size == 1


@pytest.mark.parametrize("layout", sorted(DOCUMENT_LAYOUTS))
def test_tokens_of_other_ranks_follow(layout):
    assert run_ranks(parts, 2, layout) == [(True, True, True)] * 2
