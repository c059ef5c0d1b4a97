"""Proximal policy optimization: advantages of tokens, clipped losses, the weight of divergence.

Values of tokens are rows (completions, tokens) with a mask, or flat; losses are those of tokens.
"""

import torch
from torch import Tensor


def token_rewards(scores: Tensor, log_ratios: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Return the rewards of tokens: minus the divergence from the reference, and at the end the
    score of the completion.

    `log_ratios` are log-probabilities less those of the reference.
    """
    rewards = -kl_coef * log_ratios * mask
    last = mask.sum(-1, keepdim=True).long() - 1
    return rewards.scatter_add(-1, last, scores.to(rewards.dtype).unsqueeze(-1))


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return the advantages of tokens (GAE) and their returns; 0 outside of the mask."""
    values = values * mask
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    deltas = (rewards + gamma * following - values) * mask
    advantages = torch.zeros_like(deltas)
    ahead = torch.zeros_like(deltas[:, 0])
    for position in range(deltas.shape[1] - 1, -1, -1):
        ahead = deltas[:, position] + gamma * lam * ahead
        advantages[:, position] = ahead
    return advantages * mask, (advantages + values) * mask


def policy_loss(
    log_ratios: Tensor, advantages: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of every token, and whether the clipped ratio is the one that counts.

    The ratio of probabilities, new to old, is clipped to 1 - low and 1 + high.
    """
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - low, 1 + high)
    plain_loss, clipped_loss = -advantages * ratios, -advantages * clipped
    return torch.maximum(plain_loss, clipped_loss), clipped_loss > plain_loss


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of every token's value, and whether the clipped value is the one that counts.

    A value counts as at most `clip` away from the one before the update.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    plain, clipped = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(plain, clipped), clipped > plain


def adapted_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: float) -> float:
    """Return the weight of the divergence for the next step: higher if it is above the target.

    The change of a step is limited to a fifth, divided by `horizon`.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error / horizon)
