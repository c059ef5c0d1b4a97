"""Group relative policy optimization: advantages among the completions of a prompt, no critic."""

import torch
from torch import Tensor

from mindspeed_llm.losses.kinds import GrpoLoss

EPSILON = 1e-4
"""Added to the spread of rewards, which may be 0."""


def group_advantages(rewards: Tensor, size: int, *, scaled: bool = True) -> Tensor:
    """Return the advantages of completions: rewards less their mean in groups of `size`.

    They are divided by the standard deviation of the group where they are `scaled`.
    """
    groups = rewards.view(-1, size)
    advantages = groups - groups.mean(-1, keepdim=True)
    if scaled:
        advantages = advantages / (groups.std(-1, keepdim=True) + EPSILON)
    return advantages.flatten()


def divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate the divergence from the reference at every token: never negative, and unbiased."""
    ratios = reference - log_probs
    return ratios.exp() - ratios - 1


def sequence_means(values: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Return for every token the mean of the values of its completion, 0 outside of completions.

    `numbers` says which completion a token is of: 1 to `count`, or 0. Sums have a fixed order.
    """
    each = torch.arange(1, count + 1, device=numbers.device).view(-1, *[1] * numbers.dim())
    tokens = numbers == each
    sums = values.where(tokens, 0.0).flatten(1).sum(1)
    means = sums / tokens.flatten(1).sum(1).clamp(min=1)
    return means.view_as(each).where(tokens, 0.0).sum(0)


def token_weights(lengths: Tensor, kind: GrpoLoss, *, mean_length: float, longest: int) -> Tensor:
    """Return the weight of a token for each completion; the loss is the mean over completions.

    `grpo` is the mean over the tokens of each completion, `dapo` that over all tokens, of which a
    completion has `mean_length` in the mean, and `dr_grpo` divides by the longest possible length.
    """
    if kind == "grpo":
        return 1 / lengths.float()
    return torch.full_like(
        lengths, 1 / (mean_length if kind == "dapo" else longest), dtype=torch.float32
    )
