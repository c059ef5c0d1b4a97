"""SimPO: preferences by the mean log-probability of completions, without a reference."""

import torch

from mindspeed_llm.losses.preference import Pairs, simpo_loss
from mindspeed_llm.tasks.posttrain.base import Batch
from mindspeed_llm.tasks.posttrain.pairwise import LogProbTrainer


class SimPOTrainer(LogProbTrainer):
    """Trains one model on pairs."""

    is_mean = True

    def pair_losses(
        self, batch: Batch, log_probs: Pairs, counts: Pairs
    ) -> tuple[torch.Tensor, Pairs]:
        """Return the loss and the rewards of every pair."""
        options = self.options
        losses = simpo_loss(
            log_probs,
            counts,
            beta=options.simpo_beta,
            gamma_beta_ratio=options.gamma_beta_ratio,
            kind=options.simpo_loss_type,
            label_smoothing=options.simpo_label_smoothing,
        )
        return losses, log_probs.map(lambda sums, count: options.simpo_beta * sums / count, counts)
