"""KTO: completions that are desirable or not, one for a prompt, without pairs."""

import torch
from torch import Tensor


def kto_loss(
    ratios: Tensor,
    is_desirable: Tensor,
    divergence: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the KTO loss of every completion.

    `ratios` are log-probabilities less those of the reference, `divergence` the estimate of how far
    the policy is from the reference, a number at least 0 without gradient.
    """
    desirable = desirable_weight * (1 - torch.sigmoid(beta * (ratios - divergence)))
    undesirable = undesirable_weight * (1 - torch.sigmoid(beta * (divergence - ratios)))
    return torch.where(is_desirable, desirable, undesirable)
