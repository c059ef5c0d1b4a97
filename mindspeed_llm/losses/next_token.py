"""The loss of next tokens, and how a step reports it."""

from collections.abc import Mapping

import torch

from mindspeed.training.metrics import Metric

LM_LOSS = "lm loss"


def token_loss(losses: torch.Tensor, loss_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of tokens in the loss mask, and the number of these tokens."""
    mask = loss_mask.reshape(-1).float()
    return (losses.reshape(-1).float() * mask).sum(), mask.sum().to(torch.int32)


def next_token_loss(
    losses: torch.Tensor, batch: Mapping[str, torch.Tensor], *, per_token: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of a micro-batch, what Megatron divides it by, and its report."""
    total, count = token_loss(losses, batch["loss_mask"])
    report = {
        LM_LOSS: torch.stack([total.detach(), count.float()]),
        "tokens": batch["real_tokens"],
    }
    # A micro-batch without trained tokens counts as one token of loss 0.
    return total, count if per_token else count.clamp(min=1), report


def next_token_metrics(*, per_token: bool) -> tuple[Metric, ...]:
    """Return the metrics that next_token_loss reports."""
    return (Metric(LM_LOSS, "mean" if per_token else "micro_batch_mean"),)
