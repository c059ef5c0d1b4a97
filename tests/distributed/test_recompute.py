"""Recomputation: the same gradients in every bit, dropout on, from less that is kept."""

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.gpt.layout import FFN, HEADS, HIDDEN, SEQUENCE, Layout
from tests.gpt.runs import assert_same_weights, in_ranks
from tests.gpt.saved import kept_after_forward

if TYPE_CHECKING:
    from tests.gpt.training import Training

Recompute = tuple[str, str | None, int | None]

_SELECTIVE: Recompute = ("selective", None, None)
_EVERY_LAYER: Recompute = ("full", "uniform", 1)
_PAIRS: Recompute = ("full", "uniform", 2)
_FIRST: Recompute = ("full", "block", 1)
_FIRST_THREE: Recompute = ("full", "block", 3)

_DROPOUT = Layout(dropout=0.1)
_FLOAT = 4
_TOKENS = SEQUENCE * _DROPOUT.micro_batch
_INPUT = _FLOAT * _TOKENS * HIDDEN
# Probabilities, dropout mask and dropped probabilities.
_CORE_ATTENTION = 3 * _FLOAT * _TOKENS * HEADS * SEQUENCE
# Seven tensors of the hidden width: in and out of two norms, into the projection, two dropout
# masks; query, key and value; into GELU and out of it; four columns of the norms' statistics.
_LAYER = _CORE_ATTENTION + _FLOAT * _TOKENS * (7 * HIDDEN + 3 * HIDDEN + 2 * FFN + 4)


@dataclass(frozen=True)
class Outcome:
    """How many bytes of floats a step kept for backward, and the gradients it gave."""

    kept: int
    gradients: dict[str, torch.Tensor]


@functools.cache
def _outcome(layout: Layout) -> Outcome:
    return in_ranks(layout, _measure)[0]


@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize("recompute", [_SELECTIVE, _EVERY_LAYER, _PAIRS, _FIRST, _FIRST_THREE])
def test_gradients_are_the_same_in_every_bit(recompute: Recompute, spec: str) -> None:
    plain = replace(_DROPOUT, spec=spec)
    again = _outcome(replace(plain, recompute=recompute))
    assert_same_weights(again.gradients, _outcome(plain).gradients)


@pytest.mark.parametrize("spec", ["local", "te"])
def test_gradients_are_the_same_over_tensor_and_sequence_parallel_ranks(spec: str) -> None:
    """Dropout then draws from two generators, one that ranks share and one that they do not."""
    plain = replace(_DROPOUT, tp=2, sequence_parallel=True, spec=spec)
    again = _outcome(replace(plain, recompute=_EVERY_LAYER))
    assert_same_weights(again.gradients, _outcome(plain).gradients)


def test_dropout_is_on() -> None:
    dropped, whole = _outcome(_DROPOUT).gradients, _outcome(Layout()).gradients
    assert not any(torch.equal(dropped[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("recompute", "saving"),
    [
        # What the layers kept, less the inputs they start again from.
        (_EVERY_LAYER, 4 * _LAYER - 4 * _INPUT),
        (_PAIRS, 4 * _LAYER - 2 * _INPUT),
        (_FIRST, _LAYER - _INPUT),
        (_FIRST_THREE, 3 * _LAYER - 3 * _INPUT),
        # Queries, keys and values are kept anyway.
        (_SELECTIVE, 4 * _CORE_ATTENTION),
    ],
)
def test_what_is_kept_shrinks_as_predicted(recompute: Recompute, saving: int) -> None:
    before = _outcome(_DROPOUT)
    assert _outcome(replace(_DROPOUT, recompute=recompute)).kept == before.kept - saving


@pytest.mark.parametrize("recompute", [_SELECTIVE, _EVERY_LAYER, _PAIRS])
def test_layers_of_transformer_engine_keep_no_more_than_megatrons(recompute: Recompute) -> None:
    local = _outcome(replace(_DROPOUT, recompute=recompute))
    assert _outcome(replace(_DROPOUT, recompute=recompute, spec="te")).kept == local.kept


def _measure(training: "Training") -> Outcome:
    kept = sum(k.bytes for k in kept_after_forward(training) if k.dtype.is_floating_point)
    return Outcome(kept, training.gradients())
