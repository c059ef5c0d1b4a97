"""Sums of losses that count."""

import pytest
import torch

from mindspeed_llm.losses.next_token import LM_LOSS, next_token_loss, token_loss


def test_masked_tokens_do_not_count() -> None:
    losses = torch.rand(2, 5, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]])
    total, count = token_loss(losses, mask)
    assert count.item() == 4
    torch.testing.assert_close(total.double(), losses[mask.bool()].sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("trained", [0, 1, 6])
def test_ranks_that_share_a_sequence_report_its_mean(trained: int) -> None:
    losses, mask = torch.rand(1, 8), torch.zeros(1, 8)
    mask[0, :trained] = 1
    batch = {"loss_mask": mask, "real_tokens": torch.tensor(8)}
    mean, whole = next_token_loss(losses, batch, per_token=False)
    parts = []
    for rows in (slice(0, 2), slice(2, 8)):
        share = batch | {"loss_mask": mask[:, rows], "trained_tokens": mask.sum()}
        parts.append(next_token_loss(losses[:, rows], share, per_token=False, context_ranks=2))
    torch.testing.assert_close(sum(part[0] for part in parts), mean)
    reported = [part[1][LM_LOSS] for part in parts]
    expected = whole[LM_LOSS][0] / max(trained, 1)
    torch.testing.assert_close(sum(r[0] / r[1].clamp(min=1) for r in reported) / 2, expected)
    torch.testing.assert_close(sum(reported) / 2, whole[LM_LOSS])


def test_tokens_of_a_rank_are_its_own() -> None:
    """Megatron adds them up, with those of the ranks that share the sequence."""
    batch = {"loss_mask": torch.tensor([[1, 1, 0]]), "real_tokens": torch.tensor(9)}
    batch["trained_tokens"] = torch.tensor(5.0)
    total, count, report = next_token_loss(torch.ones(1, 3), batch, per_token=True, context_ranks=2)
    assert (total.item(), count.item()) == (2.0, 2) and report[LM_LOSS].tolist() == [4.0, 5.0]
