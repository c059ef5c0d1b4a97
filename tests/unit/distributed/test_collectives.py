"""Collectives in a group of one rank, and shapes that do not split."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed.distributed.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_to_group,
    group_rank,
    group_size,
    reduce_scatter,
    resolve_group,
)

COLLECTIVES = (all_gather, reduce_scatter, all_reduce, copy_to_group, all_to_all)


@pytest.mark.parametrize("group", [None, SimpleNamespace(size=lambda: 1)])
def test_one_rank_returns_its_input(group):
    x = torch.randn(4, 2, requires_grad=True)
    assert all(collective(x, group) is x for collective in COLLECTIVES)


def test_no_group_is_a_group_of_one():
    assert (group_size(None), group_rank(None)) == (1, 0)
    group = SimpleNamespace(size=lambda: 4, rank=lambda: 3)
    assert (group_size(group), group_rank(group)) == (4, 3)


@pytest.mark.parametrize("length", [1, 5, 7])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_length_that_does_not_split_is_rejected(length, dim):
    x = torch.randn(length, 2).movedim(0, dim)
    match = f"dim {dim} of length {length} does not split over 3 ranks: pad it to a multiple of 3"
    with pytest.raises(ValueError, match=match):
        reduce_scatter(x, SimpleNamespace(size=lambda: 3), dim)


def test_the_group_of_all_ranks_needs_an_init():
    with pytest.raises(RuntimeError, match="no process group is initialized: call init_distrib"):
        resolve_group(None)
