"""PPO: a critic says what a completion was expected to be worth, token by token."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mindspeed.training.checkpoint_dir import TrainState, find_resume
from mindspeed.training.metrics import Metric, StepResult, StopCheck
from mindspeed_llm.losses.ppo import (
    adapted_kl_coef,
    generalized_advantages,
    token_rewards,
    value_loss,
)
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.tasks.posttrain.base import Batch
from mindspeed_llm.tasks.posttrain.grpo import add_values
from mindspeed_llm.tasks.posttrain.online import (
    ADVANTAGES,
    OLD,
    REFERENCE_TOKENS,
    WEIGHTS,
    OnlineTrainer,
    masked_sum,
)
from mindspeed_llm.tasks.posttrain.rollouts import Rollout, gather, padded, spread
from mindspeed_llm.training.model import ModelRole

RETURNS, OLD_VALUES = "returns", "old_values"
VALUE_METRICS = (Metric("value loss"), Metric("value clip fraction"), Metric("returns"))
CRITIC_NORM = "critic grad norm"
KL_COEF = "kl_coef"
EPSILON = 1e-8


class TrlPPOTrainer(OnlineTrainer):
    """Trains an actor on advantages that a critic gives its tokens, and the critic on returns."""

    entropy_coeff = 0.001

    def initialize(self) -> None:
        """Build the models; the weight of the divergence may have been adapted before."""
        super().initialize()
        self.kl_coef = float(self.training.state.stage.get(KL_COEF, self.options.kl_coef))

    @property
    def needs_reference(self) -> bool:
        """Whether the divergence is part of the rewards."""
        return self.options.kl_coef > 0

    @property
    def models(self) -> tuple[ModelRole, ...]:
        """The actor, the critic, and frozen models."""
        actor, *frozen = super().models
        return actor, ModelRole("critic", source="critic_model"), *frozen

    def model_shape(self, role: ModelRole) -> ModelConfig:
        """Return the sizes of a model; the critic is the actor with a value head."""
        shape, source = super().model_shape(role), self.options.critic_model
        if role.name != "critic":
            return shape
        if source is not None and find_resume(self.options) is None:  # else the checkpoint has it
            self.check_same_shape("--critic-model", source, "critic", has_value_head=True)
        return shape.with_value_head()

    def state(self, iteration: int, consumed_samples: int) -> TrainState:
        """Return what a checkpoint stores: also the weight of the divergence."""
        state = super().state(iteration, consumed_samples)
        return replace(state, stage={KL_COEF: self.kl_coef})

    def sample_and_update(self, state: TrainState, stop: StopCheck) -> StepResult:
        """Train on the next prompts, and adapt the weight of the divergence."""
        result = super().sample_and_update(state, stop)
        used, target = self.kl_coef, self.options.kl_target
        if target is not None and self.needs_reference and result.is_finite:
            kl, horizon = result.metrics["kl"], self.options.kl_horizon
            self.kl_coef = adapted_kl_coef(used, kl, target=target, horizon=horizon)
        return replace(result, metrics=result.metrics | {"kl coef": used})

    def prepare(self, rollouts: Sequence[Rollout], batches: list[Batch]) -> list[Batch]:
        """Add advantages and returns, and what they are relative to."""
        old = self.log_probs_of(self.primary, batches)
        values = self.collect(
            self.model("critic"),
            batches,
            lambda batch, values: gather(values.squeeze(-1), batch),
            has_labels=False,
        )
        reference = self.reference_token_log_probs(batches) if self.needs_reference else old
        lengths = [len(each.completion.tokens) for each in rollouts]
        means = self.mean_lengths(lengths)
        if not old:  # not a rank of the last pipeline stage: no loss is computed here
            return batches
        advantages, returns = self._advantages(rollouts, lengths, old, reference, values)
        batches = add_values(batches, OLD, old)
        batches = add_values(batches, OLD_VALUES, values)
        if self.needs_reference:
            batches = add_values(batches, REFERENCE_TOKENS, reference)
        tokens = [int(batch["loss_mask"].sum()) for batch in batches]
        batches = add_values(batches, ADVANTAGES, self._whitened(advantages).split(tokens))
        batches = add_values(batches, RETURNS, returns.split(tokens))
        prepared: list[Batch] = []
        for number, batch in enumerate(batches):
            weights = spread(torch.full((tokens[number],), 1 / means[number]), batch)
            prepared.append({**batch, WEIGHTS: weights})
        return prepared

    def update(self, batches: Sequence[Batch], stop: StopCheck) -> StepResult:
        """Update the actor and the critic once; neither by a batch that gives no finite loss."""
        actor = super().update(batches, stop)
        if not actor.is_finite:
            unknown = dict.fromkeys([metric.name for metric in VALUE_METRICS], math.nan)
            return replace(actor, metrics=actor.metrics | unknown | {CRITIC_NORM: math.nan})
        critic = self.train_model(
            self.model("critic"), self._critic_step, batches, VALUE_METRICS, stop
        )
        # What both have, such as the losses of routers, is logged for the actor.
        own = {name: n for name, n in critic.metrics.items() if name not in actor.metrics}
        return replace(
            actor,
            metrics=actor.metrics | own | {CRITIC_NORM: critic.grad_norm},
            is_updated=actor.is_updated and critic.is_updated,
            is_finite=actor.is_finite and critic.is_finite,
            should_stop=actor.should_stop or critic.should_stop,
        )

    def _critic_step(self, data_iterator: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
        batch = self.get_batch(data_iterator)
        output = self.run_model(model, batch, has_labels=False)
        return output, partial(self._critic_loss, batch)

    def _critic_loss(self, batch: Batch, output_tensor: torch.Tensor) -> Any:
        clip, returns = self.options.cliprange_value, batch[RETURNS]
        values = output_tensor.squeeze(-1)
        losses, is_clipped = value_loss(values, batch[OLD_VALUES], returns, clip=clip)
        loss = (losses * batch[WEIGHTS]).sum()
        mask, count = batch["loss_mask"], loss.new_tensor(int(batch["num_sequences"]))
        report = {
            "value loss": torch.stack([loss.detach(), count]),
            "value clip fraction": masked_sum(is_clipped, mask),
            "returns": masked_sum(returns, mask),
            "tokens": batch["real_tokens"],
        }
        return loss, count.to(torch.int32), report

    def _advantages(
        self,
        rollouts: Sequence[Rollout],
        lengths: Sequence[int],
        old: Sequence[torch.Tensor],
        reference: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the advantages and returns of all tokens of this rank, in order."""
        mask = padded([torch.ones(sum(lengths))], lengths)
        ratios = padded(old, lengths) - padded(reference, lengths)
        scores = torch.tensor([each.reward for each in rollouts])
        rewards = token_rewards(scores, ratios, mask, self.kl_coef)
        found = generalized_advantages(
            rewards,
            padded(values, lengths),
            mask,
            gamma=self.options.gamma,
            lam=self.options.lam,
        )
        return found[0][mask.bool()], found[1][mask.bool()]

    def _whitened(self, advantages: torch.Tensor) -> torch.Tensor:
        """Return advantages of mean 0 and variance 1 over the tokens of all ranks."""
        count, total = self.dp_sum([float(len(advantages)), float(advantages.sum())])
        mean = total / count
        (spread_sum,) = self.dp_sum([float((advantages - mean).square().sum())])
        return (advantages - mean) * (spread_sum / max(count - 1, 1.0) + EPSILON) ** -0.5
