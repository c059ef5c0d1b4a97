"""The loss of next tokens."""

import torch


def token_loss(losses: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses that count, and how many they are."""
    mask = loss_mask.reshape(-1).float()
    return (losses.reshape(-1).float() * mask).sum(), mask.sum().to(torch.int32)
