"""Pipeline parallelism: the same training in stages, with one live micro-batch per stage ahead."""

import pytest

from tests.gpt.layout import Layout
from tests.gpt.runs import assert_same_training, in_ranks
from tests.gpt.saved import most_live_forwards


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=4), Layout(pp=2, spec="te")])
def test_stages_train_like_the_whole(layout: Layout) -> None:
    """The two copies of a tied embedding add their gradients last: another order, not bitwise."""
    assert_same_training(layout)


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_train_like_the_whole_in_every_bit(pp: int) -> None:
    assert_same_training(Layout("llama", pp=pp), bitwise=True)


@pytest.mark.parametrize("pp", [2, 4])
def test_a_stage_keeps_no_more_micro_batches_than_stages_follow_it(pp: int) -> None:
    layout = Layout(pp=pp, micro_batch=1)
    assert layout.micro_batches == 8
    assert in_ranks(layout, most_live_forwards) == [pp - stage for stage in range(pp)]
