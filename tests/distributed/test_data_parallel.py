"""Data parallelism: the same training from a split batch, the same parameters on every rank."""

import pytest

from tests.gpt.layout import Layout
from tests.gpt.runs import STEPS, assert_same_training, trained


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2), Layout(dp=4), Layout("llama", dp=2), Layout(dp=2, spec="te")],
    ids=str,
)
def test_a_split_batch_trains_like_the_whole(layout: Layout) -> None:
    assert_same_training(layout)


@pytest.mark.parametrize("dp", [2, 4])
def test_ranks_hold_the_same_bits_after_every_step(dp: int) -> None:
    first, *others = trained(Layout(dp=dp)).fingerprints
    assert len(set(first)) == STEPS  # they do change
    assert all(other == first for other in others)
