"""Sequence parallelism: the same training, with norms and dropout on a part of the sequence."""

import pytest

from tests.gpt.layout import HIDDEN, SEQUENCE, Layout
from tests.gpt.runs import assert_same_training, in_ranks
from tests.gpt.saved import Kept, kept_after_forward

_FLOAT = 4
_LAYERS = Layout().num_layers
_NORMS = 2 * _LAYERS + 1
# Norms save their input, their output (for the matrix that follows) and two statistics a token;
# dropout follows the embedding and both halves of a layer and saves a mask.
_PREDICTED = (
    _FLOAT
    * SEQUENCE
    * Layout().micro_batch
    * (2 * HIDDEN * _NORMS + 2 * _NORMS + HIDDEN * (2 * _LAYERS + 1))
)


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
        assert _unsplit_bytes(before) == _PREDICTED
        assert _unsplit_bytes(after) == _PREDICTED / 2
        assert _bytes(after) - _unsplit_bytes(after) == _bytes(before) - _unsplit_bytes(before)


def _bytes(kept: list[Kept]) -> int:
    return sum(k.bytes for k in kept)


def _unsplit_bytes(kept: list[Kept]) -> int:
    """Sum the tensors of the hidden width and the norms' statistics.

    Nothing that tensor parallelism splits by itself is as wide as the hidden size in this model.
    """
    return _bytes([k for k in kept if len(k.shape) == 3 and k.shape[-1] in (HIDDEN, 1)])
