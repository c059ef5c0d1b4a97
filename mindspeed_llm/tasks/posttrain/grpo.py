"""GRPO: several completions of a prompt, each rewarded relative to the others; no critic."""

from collections.abc import Sequence

import torch

from mindspeed_llm.losses.grpo import group_advantages, token_weights
from mindspeed_llm.tasks.posttrain.base import Batch
from mindspeed_llm.tasks.posttrain.online import (
    ADVANTAGES,
    COMPLETIONS,
    OLD,
    REFERENCE_TOKENS,
    WEIGHTS,
    OnlineTrainer,
)
from mindspeed_llm.tasks.posttrain.rollouts import Rollout, spread


class GRPOTrainer(OnlineTrainer):
    """Trains a policy on groups of completions."""

    @property
    def group_size(self) -> int:
        """Completions of a prompt."""
        return self.options.num_generations

    @property
    def needs_reference(self) -> bool:
        """Whether the divergence is part of the loss."""
        return self.options.grpo_beta > 0

    @property
    def beta(self) -> float:  # type: ignore[override]
        """Weight of the divergence in the loss."""
        return self.options.grpo_beta

    def prepare(self, rollouts: Sequence[Rollout], batches: list[Batch]) -> list[Batch]:
        """Add the advantages of groups; the old log-probabilities where there are more updates."""
        options, size = self.options, self.options.micro_batch_size
        rewards = torch.tensor([each.reward for each in rollouts])
        advantages = group_advantages(rewards, self.group_size, scaled=not options.no_scale_rewards)
        lengths = torch.tensor([len(each.completion.tokens) for each in rollouts])
        is_trained = torch.tensor([self._is_trained(each) for each in rollouts])
        means = self.mean_lengths((lengths * is_trained).tolist())
        prepared: list[Batch] = []
        for number, batch in enumerate(batches):
            few = slice(number * size, (number + 1) * size)
            weights = token_weights(
                lengths[few],
                options.grpo_loss_type,
                mean_length=means[number],
                longest=options.max_new_tokens,
            )
            values = {ADVANTAGES: advantages[few], WEIGHTS: weights * is_trained[few]}
            if options.importance_sampling_level == "sequence":
                values[COMPLETIONS] = torch.arange(1, size + 1)
            by_token = {k: v.repeat_interleave(lengths[few]) for k, v in values.items()}
            prepared.append({**batch, **{k: spread(v, batch) for k, v in by_token.items()}})
        if self.needs_reference:
            reference = self.reference_token_log_probs(batches)
            prepared = add_values(prepared, REFERENCE_TOKENS, reference)
        if options.ppo_epochs * options.num_mini_batches > 1:
            prepared = add_values(prepared, OLD, self.log_probs_of(self.primary, batches))
        return prepared

    def _is_trained(self, rollout: Rollout) -> bool:
        return rollout.is_ended or not self.options.mask_truncated_completions

    def report(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the metrics of rollouts: also the share of groups that nothing is learned from."""
        found = super().report(rollouts)
        groups = torch.tensor([each.reward for each in rollouts]).view(-1, self.group_size)
        is_equal = (groups == groups[:, :1]).all(-1)
        equal, number = self.dp_sum([float(is_equal.sum()), float(len(groups))])
        return found | {"equal rewards": equal / number}


def add_values(batches: list[Batch], name: str, values: Sequence[torch.Tensor]) -> list[Batch]:
    """Add values of tokens to micro-batches; only ranks of the last pipeline stage have some."""
    if not values:
        return batches
    return [{**batch, name: spread(each, batch)} for batch, each in zip(batches, values)]
