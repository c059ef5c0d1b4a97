"""Sequence parallelism: the same training, with norms and dropout on a part of the sequence."""

import pytest

from tests.gpt.layout import HIDDEN, Layout
from tests.gpt.runs import assert_same_training, in_ranks
from tests.gpt.saved import Kept, kept_after_forward


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, sequence_parallel=True),
        Layout(tp=2, sequence_parallel=True, spec="te"),
        Layout("llama", tp=2, sequence_parallel=True),
        Layout("llama", tp=2, sequence_parallel=True, spec="te"),
    ],
    ids=str,
)
def test_a_split_sequence_trains_like_the_whole(layout: Layout) -> None:
    assert_same_training(layout)


@pytest.mark.parametrize("spec", ["local", "te"])
def test_a_rank_keeps_its_part_of_what_norms_and_dropout_save(spec: str) -> None:
    whole = in_ranks(Layout(tp=2, dropout=0.1, spec=spec), kept_after_forward)
    split = in_ranks(
        Layout(tp=2, dropout=0.1, sequence_parallel=True, spec=spec), kept_after_forward
    )
    for before, after in zip(whole, split):
        assert _bytes(after, outside_matrices=True) == _bytes(before, outside_matrices=True) / 2
        assert _bytes(after, outside_matrices=False) == _bytes(before, outside_matrices=False)


def _bytes(kept: list[Kept], *, outside_matrices: bool) -> int:
    """Sum the tensors of the hidden width and the norms' statistics, or all others.

    Nothing that tensor parallelism already splits is as wide as the hidden size in this model.
    """
    widths = (HIDDEN, 1)
    return sum(
        k.bytes for k in kept if (k.shape[-1] in widths and len(k.shape) == 3) == outside_matrices
    )
