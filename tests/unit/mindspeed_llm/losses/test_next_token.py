"""Sums of losses that count."""

import torch

from mindspeed_llm.losses.next_token import token_loss


def test_masked_tokens_do_not_count() -> None:
    losses = torch.rand(2, 5, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]])
    total, count = token_loss(losses, mask)
    assert count.item() == 4
    torch.testing.assert_close(total.double(), losses[mask.bool()].sum(), rtol=1e-6, atol=1e-6)
