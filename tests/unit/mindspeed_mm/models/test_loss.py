"""From labels to targets, and from the losses of tokens to one number."""

import pytest
import torch

from mindspeed_mm.models.loss import IGNORED, mean, next_tokens


def test_every_position_predicts_the_label_behind_it():
    labels = torch.tensor([[5, 6, 7], [8, IGNORED, 9]])
    assert next_tokens(labels).tolist() == [[6, 7, IGNORED], [IGNORED, 9, IGNORED]]


@pytest.mark.parametrize("kind", ["default", "per_sample_loss", "square_loss"])
def test_means_are_those_of_their_formulas(kind):
    torch.manual_seed(0)
    counts = [4, 0, 1, 3]  # one sample has nothing to learn
    targets = torch.full((4, 5), IGNORED)
    for row, count in zip(targets, counts):
        row[:count] = 1
    losses = torch.rand(4, 5).double() * (targets != IGNORED)
    sums = losses.sum(1).tolist()
    learnt = [(total, count) for total, count in zip(sums, counts) if count]
    expected = {
        "default": sum(total for total, _ in learnt) / sum(counts),
        "per_sample_loss": sum(total / count for total, count in learnt) / len(learnt),
        "square_loss": sum(total / count**0.5 for total, count in learnt)
        / sum(count**0.5 for _, count in learnt),
    }
    assert mean(losses, targets, kind).item() == pytest.approx(expected[kind], rel=1e-6)


@pytest.mark.parametrize("kind", ["default", "per_sample_loss", "square_loss"])
def test_nothing_to_learn_is_zero(kind):
    assert mean(torch.zeros(2, 3), torch.full((2, 3), IGNORED), kind).item() == 0.0
