"""Collectives of one rank, and what cannot be shared out."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed.parallel.tensor.collectives import all_gather, all_reduce, reduce_scatter


@pytest.mark.parametrize("group", [None, SimpleNamespace(size=lambda: 1)])
def test_one_rank_keeps_what_it_has(group):
    x = torch.randn(4, 2)
    assert all(function(x, group) is x for function in (all_gather, reduce_scatter, all_reduce))


@pytest.mark.parametrize("length", [1, 5, 7])
def test_a_sequence_that_does_not_split_is_refused(length):
    with pytest.raises(ValueError, match=f"sequence length {length} does not split over 3"):
        reduce_scatter(torch.randn(length, 2), SimpleNamespace(size=lambda: 3))
