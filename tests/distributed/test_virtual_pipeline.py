"""Virtual pipeline stages: layers dealt out in rounds, and the same training in every bit."""

from typing import TYPE_CHECKING

import pytest

from tests.gpt.layout import Layout
from tests.gpt.runs import assert_same_training, in_ranks
from tests.gpt.saved import most_live_forwards

if TYPE_CHECKING:
    from tests.gpt.training import Training

_EIGHT_LAYERS = Layout("llama", num_layers=8, pp=2, layers_per_virtual_stage=2)


@pytest.mark.parametrize(
    ("layout", "placement"),
    [
        (_EIGHT_LAYERS, [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]),
        (Layout(pp=2, layers_per_virtual_stage=1), [[[1], [3]], [[2], [4]]]),
    ],
)
def test_layers_are_dealt_out_in_rounds(layout: Layout, placement: list[list[list[int]]]) -> None:
    assert in_ranks(layout, _placement) == placement


def test_virtual_stages_train_like_the_whole_in_every_bit() -> None:
    assert_same_training(_EIGHT_LAYERS, bitwise=True)


@pytest.mark.parametrize("spec", ["local", "te"])
def test_virtual_stages_train_like_the_whole_with_tied_embeddings(spec: str) -> None:
    assert_same_training(Layout(pp=2, layers_per_virtual_stage=1, spec=spec))


def test_interleaving_keeps_as_many_forwards_as_its_schedule_says() -> None:
    layout = Layout(pp=2, layers_per_virtual_stage=1, micro_batch=1)
    rounds = layout.virtual_stages or 1
    warm_up = [2 * (layout.pp - stage - 1) + (rounds - 1) * layout.pp for stage in range(layout.pp)]
    assert in_ranks(layout, most_live_forwards) == [forwards + 1 for forwards in warm_up]


def _placement(training: "Training") -> list[list[int]]:
    return [[layer.layer_number for layer in chunk.decoder.layers] for chunk in training.chunks]
