"""Outcome reward model: a value head scores whole completions, chosen ones above rejected ones."""

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed.training.metrics import Metric
from mindspeed_llm.data.collate import split_pairs
from mindspeed_llm.data.stream import Sample
from mindspeed_llm.losses.log_probs import sequence_sums
from mindspeed_llm.losses.next_token import LM_LOSS
from mindspeed_llm.losses.preference import (
    REWARDS,
    Pairs,
    report_rewards,
    reward_loss,
    sum_and_count,
)
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.tasks.posttrain.base import Batch
from mindspeed_llm.tasks.posttrain.pairwise import PairwiseTrainer
from mindspeed_llm.tasks.posttrain.rows import last_tokens
from mindspeed_llm.training.model import ModelRole

ACCURACY = "accuracy"


class ORMTrainer(PairwiseTrainer):
    """Trains a model with a value head on pairs; a completion's reward is that of its last token.

    The head is that of --load, or a new one where --load is a language model.
    """

    def model_shape(self, role: ModelRole) -> ModelConfig:
        """Return the sizes of the model, with a value head."""
        labels = self.setup.shape.num_labels
        if labels > 1:
            raise ConfigError(
                f"--load {self.options.load}: has {labels} labels: a reward model has 1"
            )
        return self.setup.shape.with_value_head()

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Pad or concatenate the sequences of pairs, and mark the last token of each."""
        batch = super().collate(samples)
        lengths = [len(each["input_ids"]) for each in split_pairs(samples)]
        is_last = torch.zeros_like(batch["loss_mask"])
        is_last.view(-1)[last_tokens(batch, lengths)] = 1
        return batch | {"is_last": is_last}

    @property
    def metrics(self) -> Sequence[Metric]:
        """The loss, rewards, and how often the chosen one is higher."""
        return tuple(Metric(name) for name in (LM_LOSS, ACCURACY, *REWARDS[:3]))

    def run_model(self, model: Any, batch: Batch, *, has_labels: bool = True) -> torch.Tensor:
        """Return the values of all tokens; there are no labels."""
        return super().run_model(model, batch, has_labels=False)

    def loss_func(self, batch: Batch, output_tensor: torch.Tensor) -> Any:
        """Sum the losses of pairs; Megatron divides by their number."""
        values = output_tensor.squeeze(-1).float().masked_fill(batch["is_last"] == 0, 0.0)
        rewards = Pairs.of(sequence_sums(values, batch, self.context_group))
        losses = reward_loss(rewards)
        report = report_rewards(rewards.map(torch.Tensor.detach))
        report[ACCURACY] = report.pop(REWARDS[3])
        report |= {LM_LOSS: sum_and_count(losses), "tokens": batch["real_tokens"]}
        return self.sum_of_losses(losses, report)
