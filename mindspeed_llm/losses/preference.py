"""Losses of preferences: pairs of a chosen and a rejected completion, or single ones (KTO).

Log-probabilities are those of whole completions, shape (pairs,), and so are the losses.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_llm.losses.kinds import DpoLoss, SimpoLoss


class Pairs(NamedTuple):
    """A value for the chosen and for the rejected completion of every pair."""

    chosen: Tensor
    rejected: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "Pairs":
        """Split values of sequences, all chosen ones before all rejected ones."""
        return cls(*values.chunk(2))

    def map(self, function: Callable[..., Tensor], *others: "Pairs") -> "Pairs":
        """Apply a function to the values of the chosen, and to those of the rejected."""
        return Pairs(*(function(*values) for values in zip(self, *others)))

    @property
    def margin(self) -> Tensor:
        """How much larger the value of the chosen is."""
        return self.chosen - self.rejected


def dpo_loss(
    ratios: Pairs,
    counts: Pairs,
    *,
    beta: float,
    kind: DpoLoss = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the DPO loss of every pair.

    `ratios` are log-probabilities less those of the reference, `counts` the tokens of completions,
    over which `ipo` takes the mean. `label_smoothing` is the share of pairs whose labels are
    expected to be wrong. `kto_pair` estimates the divergence from the reference by the mean over
    the pairs given.
    """
    if kind == "ipo":
        means = ratios.map(torch.div, counts)
        return (means.margin - 1 / (2 * beta)).square()
    if kind == "kto_pair":
        divergence = ratios.map(lambda values: values.mean().clamp(min=0))
        # Each side is compared with the divergence of the other.
        above = torch.sigmoid(beta * (ratios.chosen - divergence.rejected))
        below = torch.sigmoid(beta * (divergence.chosen - ratios.rejected))
        return 1 - (above + below) / 2
    return _ranking_loss(beta * ratios.margin, kind, label_smoothing)


def simpo_loss(
    log_probs: Pairs,
    counts: Pairs,
    *,
    beta: float,
    gamma_beta_ratio: float,
    kind: SimpoLoss = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the SimPO loss of every pair: mean log-probabilities, a target margin, no reference.

    The target margin of rewards is `beta` times `gamma_beta_ratio`.
    """
    margin = log_probs.map(torch.div, counts).margin - gamma_beta_ratio
    if kind == "ipo":
        return (margin - 1 / (2 * beta)).square()
    return _ranking_loss(beta * margin, kind, label_smoothing)


def kto_loss(
    ratios: Tensor,
    is_desirable: Tensor,
    divergence: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the KTO loss of every completion, of which a prompt has one: desirable or not.

    `ratios` are log-probabilities less those of the reference, `divergence` the estimate of how far
    the policy is from the reference, a number at least 0 without gradient.
    """
    desirable = desirable_weight * (1 - torch.sigmoid(beta * (ratios - divergence)))
    undesirable = undesirable_weight * (1 - torch.sigmoid(beta * (divergence - ratios)))
    return torch.where(is_desirable, desirable, undesirable)


def reward_loss(rewards: Pairs) -> Tensor:
    """Return the loss of a reward model: the chosen completion is to have the higher reward."""
    return -F.logsigmoid(rewards.margin)


def completion_loss(log_probs: Pairs, counts: Pairs) -> Tensor:
    """Return the mean next-token loss of every chosen completion."""
    return -log_probs.chosen / counts.chosen


def _ranking_loss(logits: Tensor, kind: str, label_smoothing: float) -> Tensor:
    if kind == "hinge":
        return torch.relu(1 - logits)
    if not label_smoothing:
        return -F.logsigmoid(logits)
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def sum_and_count(values: Tensor) -> Tensor:
    """Return what a mean over all micro-batches is made of."""
    count = torch.full((), values.numel(), dtype=torch.float32, device=values.device)
    return torch.stack([values.detach().float().sum(), count])


REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
LOG_PROBS = ("logps/chosen", "logps/rejected")


def report_rewards(rewards: Pairs) -> dict[str, Tensor]:
    """Return the report of rewards: their means, and how often the chosen one is higher."""
    values: Sequence[Tensor] = (*rewards, rewards.margin, (rewards.margin > 0).float())
    return {name: sum_and_count(each) for name, each in zip(REWARDS, values)}


def report_log_probs(log_probs: Pairs) -> dict[str, Tensor]:
    """Return the report of log-probabilities."""
    return {name: sum_and_count(each) for name, each in zip(LOG_PROBS, log_probs)}
