"""What stages on sampled completions share: the updates of a policy on them, and its loss.

A step samples completions of its prompts with the policy as it is, computes their rewards, and
updates the policy on them --ppo-epochs x --num-mini-batches times.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch

from mindspeed.distributed.seeds import seed_everything
from mindspeed.training.checkpoint_dir import TrainState
from mindspeed.training.metrics import MeanMetrics, Metric, PendingStep, StepResult, StopCheck
from mindspeed_llm.losses.grpo import divergence, sequence_means
from mindspeed_llm.losses.log_probs import token_log_probs
from mindspeed_llm.losses.ppo import policy_loss
from mindspeed_llm.losses.vocab_parallel import entropy, label_losses
from mindspeed_llm.tasks.posttrain.base import Batch
from mindspeed_llm.tasks.posttrain.rollouts import Rollout, gather
from mindspeed_llm.tasks.posttrain.sampling import SAMPLED, SamplingTrainer
from mindspeed_llm.training.model import RoleModel
from mindspeed_llm.training.step import BatchShape, train_on_batch
from mindspeed_llm.training.trainer import repeated

T = TypeVar("T")
OLD, REFERENCE_TOKENS = "old_log_probs", "reference_token_log_probs"
ADVANTAGES, WEIGHTS = "advantages", "weights"
"""Where a micro-batch has the values of tokens."""
COMPLETIONS = "completions"
"""Where it says which completion a token is of, from 1 on, if the ratio is that of completions."""


class OnlineTrainer(SamplingTrainer):
    """Trains a policy on its own completions; a stage gives their advantages."""

    entropy_coeff: ClassVar[float] = 0.0
    """Weight of the entropy where --entropy-coeff is not given."""
    beta: float = 0.0
    """Weight of the divergence from the reference in the loss."""

    def train_step(self, state: TrainState, stop: StopCheck) -> PendingStep:
        """Sample completions of the next prompts, and update the policy on them."""
        return PendingStep.finished(self.sample_and_update(state, stop))

    def sample_and_update(self, state: TrainState, stop: StopCheck) -> StepResult:
        """Train on the next prompts to the end: the next step samples from the trained policy."""
        seed_everything(self.options.seed, state.iteration + 1)
        rollouts = self.roll_out(self._batches, state.consumed_samples)
        batches = self.make_batches(rollouts)
        self.score(rollouts, batches)
        self.log_completions(state.iteration + 1, rollouts)
        batches = self.prepare(rollouts, batches)
        results = [
            self.update(part, stop)
            for _ in range(self.options.ppo_epochs)
            for part in self._parts(batches)
        ]
        per_pass = self.options.num_mini_batches
        return merge_results(self.report(rollouts), results, per_pass)

    @abstractmethod
    def prepare(self, rollouts: Sequence[Rollout], batches: list[Batch]) -> list[Batch]:
        """Add advantages, weights and whatever else the loss needs to the micro-batches."""

    def update(self, batches: Sequence[Batch], stop: StopCheck) -> StepResult:
        """Update the policy once."""
        with self.tempered(self.primary):
            return self.train_model(self.primary, self.forward_step, batches, self.metrics, stop)

    def train_model(
        self,
        model: RoleModel,
        forward_step: Any,
        batches: Sequence[Batch],
        metrics: Sequence[Metric],
        stop: StopCheck,
    ) -> StepResult:
        """Update a model once by micro-batches."""
        return train_on_batch(
            model,
            forward_step,
            repeated(batches, model),
            BatchShape(*self.sizes, len(batches)),
            metrics=metrics,
            stop=stop,
        ).wait()

    # The loss of the policy.

    @property
    def metrics(self) -> Sequence[Metric]:
        """The loss of the policy, and how far it moves."""
        names = ["policy loss", "entropy", "clip fraction", "ratio"]
        more = [Metric("kl")] if self.needs_reference else []
        return *(Metric(name) for name in names), *more, Metric("sampling difference", "max")

    def run_model(self, model: Any, batch: Batch, *, has_labels: bool = True) -> torch.Tensor:
        """Return the losses of labels; the logits where their entropy counts."""
        is_policy = torch.is_grad_enabled() and has_labels
        return super().run_model(
            model, batch, has_labels=has_labels and not (is_policy and self._entropy_coeff)
        )

    def loss_func(self, batch: Batch, output_tensor: torch.Tensor) -> Any:
        """Sum the weighted losses of tokens; Megatron divides by the number of completions."""
        losses, bonus = output_tensor, None
        if self._entropy_coeff:
            group = _tensor_parallel_group()
            bonus = entropy(output_tensor, group)
            losses = label_losses(output_tensor, batch["labels"])
        log_probs, weights = token_log_probs(losses, batch), batch[WEIGHTS]
        old = batch[OLD] if OLD in batch else log_probs.detach()
        log_ratios, sequences = log_probs - old, int(batch["num_sequences"])
        if COMPLETIONS in batch:
            log_ratios = sequence_means(log_ratios, batch[COMPLETIONS], sequences)
        low, high = self.options.clip_ratio, self._clip_high
        found, is_clipped = policy_loss(log_ratios, batch[ADVANTAGES], low=low, high=high)
        if self.beta:
            found = found + self.beta * divergence(log_probs, batch[REFERENCE_TOKENS])
        if bonus is not None:
            found = found - self._entropy_coeff * bonus
        loss = (found * weights).sum()
        values = {
            "entropy": -log_probs.detach() if bonus is None else bonus.detach(),
            "clip fraction": is_clipped,
            "ratio": log_ratios.detach().exp(),
        }
        if self.needs_reference:
            values["kl"] = divergence(log_probs.detach(), batch[REFERENCE_TOKENS])
        count = loss.new_tensor(sequences)
        # Completions that are left out have no weight.
        report = {name: masked_sum(each, weights != 0) for name, each in values.items()}
        report["policy loss"] = torch.stack([loss.detach(), count])
        difference = (old - batch[SAMPLED]).abs() * batch["loss_mask"]
        report["sampling difference"] = difference.max()
        report["tokens"] = batch["real_tokens"]
        return loss, count.to(torch.int32), report

    # What other models say.

    def log_probs_of(self, model: RoleModel, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return a model's log-probabilities of the completions' tokens, on the last stage."""
        with self.tempered(model):
            return self.collect(
                model, batches, lambda batch, losses: gather(token_log_probs(losses, batch), batch)
            )

    def reference_token_log_probs(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the reference's log-probabilities of tokens, on the last stage."""
        with self._without_adapters():
            return self.log_probs_of(self._reference, batches)

    @contextmanager
    def tempered(self, model: RoleModel) -> Iterator[None]:
        """Divide the logits of a model by --temperature, as sampling does."""
        temperature = self.options.temperature
        layers = [c.output_layer for c in model.chunks if c.post_process and temperature != 1]

        def divide(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            return arguments[0] / temperature, *arguments[1:]

        hooks = [layer.register_forward_pre_hook(divide) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def mean_lengths(self, lengths: Sequence[int]) -> list[float]:
        """Return the mean length of completions for each micro-batch: of its update, on all ranks.

        `lengths` are the trained tokens of this rank's completions. A mean is not 0.
        """
        parts = self._parts(lengths)
        sums = self.dp_sum([float(n) for part in parts for n in (sum(part), len(part))])
        means = [max(tokens, 1.0) / count for tokens, count in zip(sums[::2], sums[1::2])]
        per_update = len(lengths) // self.options.micro_batch_size // len(parts)
        return [mean for mean in means for _ in range(per_update)]

    def _parts(self, values: Sequence[T]) -> list[Sequence[T]]:
        """Return what belongs to every update of a pass: its micro-batches, or completions."""
        size = len(values) // self.options.num_mini_batches
        return [values[start : start + size] for start in range(0, len(values), size)]

    @property
    def _entropy_coeff(self) -> float:
        given = self.options.entropy_coeff
        return self.entropy_coeff if given is None else given

    @property
    def _clip_high(self) -> float:
        options = self.options
        return options.clip_ratio if options.clip_ratio_high is None else options.clip_ratio_high


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return what a mean over the tokens of all micro-batches is made of."""
    return torch.stack([(values.float() * mask).sum(), mask.sum().float()])


def merge_results(
    rollouts: dict[str, float], results: Sequence[StepResult], per_pass: int
) -> StepResult:
    """Return the result of a step of several updates: means of metrics, the tokens of a pass."""
    count, means = len(results), MeanMetrics()
    for result in results:
        means.add(result.metrics)
    return StepResult(
        metrics=rollouts | means.values(),
        grad_norm=sum(result.grad_norm for result in results) / count,
        tokens=sum(result.tokens for result in results[:per_pass]),
        loss_scale=results[-1].loss_scale,
        is_updated=all(result.is_updated for result in results),
        is_finite=all(result.is_finite for result in results),
        should_stop=any(result.should_stop for result in results),
    )


def _tensor_parallel_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()
