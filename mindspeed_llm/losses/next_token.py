"""The loss of next tokens, and how a step reports it."""

from collections.abc import Mapping
from typing import Any

import torch

from mindspeed.training.metrics import Metric

LM_LOSS = "lm loss"


def token_loss(losses: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of tokens in the loss mask, and the number of these tokens."""
    mask = loss_mask.reshape(-1).float()
    return (losses.reshape(-1).float() * mask).sum(), mask.sum().to(torch.int32)


def next_token_loss(
    losses: torch.Tensor,
    batch: Mapping[str, torch.Tensor],
    *,
    per_token: bool,
    context_ranks: int = 1,
) -> tuple[Any, ...]:
    """Return the loss of a micro-batch as Megatron's schedules take it, and its report last.

    That is the sum of the losses of this rank and their number, which the schedule adds up over the
    step (`per_token`), or else the part of the micro-batch's mean. Where `context_ranks` share a
    sequence, `trained_tokens` of the batch is the number of tokens that all of them train.
    """
    total, count = token_loss(losses, batch["loss_mask"])
    # A rank reports what the whole sequence would give if all ranks had the same losses: the mean
    # over the ranks is right, for means over tokens and over micro-batches.
    everywhere = count.float()
    if context_ranks > 1:
        everywhere = torch.full_like(total, float(batch["trained_tokens"]), requires_grad=False)
    report = {
        LM_LOSS: torch.stack([total.detach() * context_ranks, everywhere]),
        "tokens": batch["real_tokens"],
    }
    if per_token:
        return total, count, report
    # A micro-batch without trained tokens counts as one token of loss 0. Of two values Megatron
    # multiplies the first by the number of ranks, over which gradients are averaged; of three only
    # some releases do.
    return total / everywhere.clamp(min=1), report


def next_token_metrics(*, per_token: bool) -> tuple[Metric, ...]:
    """Return the metrics that next_token_loss reports."""
    if per_token:
        return (Metric(LM_LOSS, "mean", over="all tokens"),)
    return (Metric(LM_LOSS, "micro_batch_mean", over="micro-batches"),)
