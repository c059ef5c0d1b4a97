"""Targets from labels, and the reduction of token losses."""

import pytest
import torch

from mindspeed_mm.models.loss import IGNORED, next_tokens, reduce_loss


def test_every_position_predicts_the_next_label():
    labels = torch.tensor([[5, 6, 7], [8, IGNORED, 9]])
    assert next_tokens(labels).tolist() == [[6, 7, IGNORED], [IGNORED, 9, IGNORED]]


@pytest.mark.parametrize("loss_type", ["default", "per_sample_loss", "square_loss"])
def test_reductions_equal_their_formulas(loss_type):
    torch.manual_seed(0)
    counts = [4, 0, 1, 3]  # one sample has no target
    targets = torch.full((4, 5), IGNORED)
    for row, count in zip(targets, counts):
        row[:count] = 1
    losses = torch.rand(4, 5).double() * (targets != IGNORED)
    sums = losses.sum(1).tolist()
    counted = [(total, count) for total, count in zip(sums, counts) if count]
    expected = {
        "default": sum(total for total, _ in counted) / sum(counts),
        "per_sample_loss": sum(total / count for total, count in counted) / len(counted),
        "square_loss": sum(total / count**0.5 for total, count in counted)
        / sum(count**0.5 for _, count in counted),
    }
    assert reduce_loss(losses, targets, loss_type).item() == pytest.approx(
        expected[loss_type], rel=1e-6
    )


@pytest.mark.parametrize("loss_type", ["default", "per_sample_loss", "square_loss"])
def test_the_loss_without_targets_is_zero(loss_type):
    assert reduce_loss(torch.zeros(2, 3), torch.full((2, 3), IGNORED), loss_type).item() == 0.0
