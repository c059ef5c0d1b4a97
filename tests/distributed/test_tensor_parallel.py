"""Tensor parallelism: the same training from split matrices, of which a rank holds its part."""

from typing import TYPE_CHECKING

import pytest

from tests.gpt.layout import FFN, HIDDEN, SEQUENCE, VOCABULARY, Layout
from tests.gpt.runs import assert_same_training, assert_same_weights, in_ranks, trained

if TYPE_CHECKING:
    from tests.gpt.training import Training


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(tp=4),
        Layout("llama", tp=2),
        Layout(tp=2, spec="te"),
        Layout("llama", tp=2, spec="te"),
    ],
    ids=str,
)
def test_split_matrices_train_like_whole_ones(layout: Layout) -> None:
    assert_same_training(layout)


@pytest.mark.parametrize("spec", ["local", "te"])
def test_a_rank_holds_its_part_of_each_matrix(spec: str) -> None:
    layout = Layout(tp=2, spec=spec)
    for count in in_ranks(layout, _count_parameters):
        assert count == _parameters_per_rank(layout)


def test_bf16_with_fp32_master_weights_trains_alike() -> None:
    """bf16 has 8 bits: 4e-3 an operation, of which steps leave 5e-4 in the mean loss."""
    whole, split = trained(Layout(bf16=True)), trained(Layout(bf16=True, tp=2))
    exact = trained(Layout())
    assert whole.falls
    assert split.losses == pytest.approx(whole.losses, rel=1e-3)
    assert whole.losses == pytest.approx(exact.losses, rel=5e-3)
    # A norm's weight near one is stored in steps of 2**-7.
    assert_same_weights(split.weights, whole.weights, atol=1e-2)


def _count_parameters(training: "Training") -> int:
    return sum(parameter.numel() for parameter in training.chunks[0].parameters())


def _parameters_per_rank(layout: Layout) -> int:
    split_of_layer = (
        (3 * HIDDEN * HIDDEN + 3 * HIDDEN)  # query, key and value
        + HIDDEN * HIDDEN  # projection; its bias is added after the sum
        + (FFN * HIDDEN + FFN)
        + HIDDEN * FFN
    )
    whole_of_layer = 2 * 2 * HIDDEN + 2 * HIDDEN  # two norms, two row-parallel biases
    split = layout.num_layers * split_of_layer + VOCABULARY * HIDDEN
    whole = layout.num_layers * whole_of_layer + SEQUENCE * HIDDEN + 2 * HIDDEN
    return split // layout.tp + whole
