"""What stages on sampled completions share: rollout, rewards, and updates on them.

A step samples completions of its prompts with the policy as it is, computes their rewards, and
updates the policy on them --ppo-epochs x --num-mini-batches times.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import torch

from mindspeed import device
from mindspeed.config import ConfigError
from mindspeed.distributed.seeds import seed_everything
from mindspeed.training.checkpoint_dir import TrainState
from mindspeed.training.metrics import Metric, StepResult
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.stream import Sample
from mindspeed_llm.data.tokenizer import load_facts
from mindspeed_llm.generation.rollout import MegatronRollout, RolloutEngine, Sampling
from mindspeed_llm.generation.text import eos_ids
from mindspeed_llm.losses.grpo import divergence
from mindspeed_llm.losses.log_probs import token_log_probs
from mindspeed_llm.losses.ppo import policy_loss
from mindspeed_llm.losses.vocab_parallel import entropy, label_losses
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.tasks.posttrain.base import Batch
from mindspeed_llm.tasks.posttrain.reference import ReferenceTrainer
from mindspeed_llm.tasks.posttrain.rollouts import (
    LAST_TOKENS,
    Prompt,
    Rollout,
    collate_prompts,
    collate_rollouts,
    gather,
    split_prompts,
    spread,
)
from mindspeed_llm.tasks.posttrain.rows import Rows
from mindspeed_llm.tasks.posttrain.scoring import TextScores, assign_rewards
from mindspeed_llm.training.model import ModelRole, RoleModel
from mindspeed_llm.training.step import BatchShape, train_on_batch

SAMPLED, OLD, REFERENCE = "sampled_log_probs", "old_log_probs", "reference_log_probs"
ADVANTAGES, WEIGHTS = "advantages", "weights"
"""Where a micro-batch has the values of tokens."""
EVALUATION = 1 << 48
"""Added to the numbers of completions that are sampled for an evaluation."""


class OnlineTrainer(ReferenceTrainer):
    """Trains a policy on its own completions; a stage gives their advantages."""

    handler = "PPOAlpacaStyleInstructionHandler"
    data_kind: ClassVar[str] = "prompts"
    entropy_coeff: ClassVar[float] = 0.0
    """Weight of the entropy where --entropy-coeff is not given."""
    beta: float = 0.0
    """Weight of the divergence from the reference in the loss."""

    # Models and data.

    @property
    def group_size(self) -> int:
        """Completions of a prompt."""
        return 1

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether the divergence from a reference counts."""

    @property
    def models(self) -> tuple[ModelRole, ...]:
        """The policy, and frozen models: a reference and a reward model where they are needed."""
        roles = super().models if self.needs_reference else (ModelRole("policy"),)
        if self.options.reward_model is None:
            return roles
        return *roles, ModelRole("reward", trainable=False, saved=False, source="reward_model")

    def model_shape(self, role: ModelRole) -> ModelConfig:
        """Return the sizes of a model; a reward model has those of its own config."""
        return self._reward_shape() if role.name == "reward" else super().model_shape(role)

    @property
    def longest_sample(self) -> int | None:
        """Longer prompts of data files are left out."""
        return self.options.max_prompt_length

    def initialize(self) -> None:
        """Build the models, and what samples completions and computes their rewards."""
        super().initialize()
        self.stop_ids = self._find_stop_ids()
        self.engine = self.make_engine()
        self._scores = None if self.options.reward_model else self._text_scores()

    def make_engine(self) -> RolloutEngine:
        """Return what samples completions; a stage of your own may return another engine."""
        limit = self.sampling.max_length
        size = self.options.rollout_batch_size
        return MegatronRollout(self.primary, self.setup.shape, limit, size)

    @property
    def sampling(self) -> Sampling:
        """How completions are sampled."""
        options = self.options
        return Sampling(
            max_new_tokens=options.max_new_tokens,
            max_length=options.max_length or self._model_length,
            stop_ids=self.stop_ids,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        )

    def configure_batches(self, data: Sequence[InstructionData]) -> None:
        """Check that prompts and completions fit, and that this layout can sample."""
        self._check_layout()
        self._check_lengths(data)
        self.rows = Rows.of(self.options, self.setup.shape, data)
        self._data_stop_ids = {token for one in data for token in one.facts.get("stop_ids", ())}

    @property
    def sizes(self) -> tuple[int, int]:
        """A row a completion, as long as the longest of the step."""
        return self.rows.length, self.options.micro_batch_size

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Concatenate prompts; rows are made when they have completions."""
        return collate_prompts(samples)

    # A step.

    def train(self) -> TrainState:
        """Train to the last step."""
        try:
            return super().train()
        finally:
            if self._scores is not None:
                self._scores.close()

    def train_step(self, state: TrainState, stop: bool) -> StepResult:
        """Sample completions of the next prompts, and update the policy on them."""
        seed_everything(self.options.seed, state.iteration + 1)
        rollouts = self.roll_out(self._batches, state.consumed_samples)
        batches = self.make_batches(rollouts)
        self._assign_rewards(rollouts, batches)
        batches = self.prepare(rollouts, batches)
        results = [
            self.update(part, stop)
            for _ in range(self.options.ppo_epochs)
            for part in self._parts(batches)
        ]
        per_pass = self.options.num_mini_batches
        return merge_results(self._report(rollouts), results, per_pass)

    def roll_out(self, batches: Iterator[Any], consumed: int) -> list[Rollout]:
        """Complete the prompts of the next global batch, each --num-generations times."""
        prompts = list(self._next_prompts(batches, consumed))
        repeated = [prompt for prompt in prompts for _ in range(self.group_size)]
        size = self.group_size
        numbers = [p.number * size + copy for p in prompts for copy in range(size)]
        found = self.engine.generate([p.tokens for p in repeated], self.sampling, numbers)
        return [
            Rollout(prompt, completion, completion.tokens[-1] in self.stop_ids)
            for prompt, completion in zip(repeated, found)
        ]

    def make_batches(self, rollouts: Sequence[Rollout]) -> list[Batch]:
        """Make micro-batches of completions, with the log-probabilities of sampling."""
        multiple, size = self.rows.multiple, self.options.micro_batch_size
        longest = max(len(each.sample["input_ids"]) for each in rollouts)
        self.rows = replace(self.rows, length=-(-longest // multiple) * multiple)
        batches: list[Batch] = []
        for start in range(0, len(rollouts), size):
            few = rollouts[start : start + size]
            batch = collate_rollouts(few, self.rows)
            sampled = torch.tensor([p for each in few for p in each.completion.log_probs])
            batches.append(batch | {SAMPLED: spread(sampled, batch)})
        return batches

    @abstractmethod
    def prepare(self, rollouts: Sequence[Rollout], batches: list[Batch]) -> list[Batch]:
        """Add advantages, weights and whatever else the loss needs to the micro-batches."""

    def update(self, batches: Sequence[Batch], stop: bool) -> StepResult:
        """Update the policy once."""
        with self.tempered(self.primary):
            return self.train_model(self.primary, self.forward_step, batches, self.metrics, stop)

    def train_model(
        self,
        model: RoleModel,
        forward_step: Any,
        batches: Sequence[Batch],
        metrics: Sequence[Metric],
        stop: bool,
    ) -> StepResult:
        """Update a model once by micro-batches."""
        return train_on_batch(
            model,
            forward_step,
            [iter(batches)],
            BatchShape(*self.sizes, len(batches)),
            metrics=metrics,
            stop=stop,
        )

    def evaluate(self) -> dict[str, float] | None:
        """Return the rewards of completions of the validation prompts."""
        if self.valid_data is None:
            return None
        rollouts: list[Rollout] = []
        batches = self._prefetch(self.valid_data, 0)
        try:
            for number in range(self.options.eval_iters):
                consumed = number * self.setup.dims.global_batch_size
                found = self.roll_out(batches, EVALUATION + consumed)
                self._assign_rewards(found, self.make_batches(found))
                rollouts += found
        finally:
            batches.close()
        return self._report(rollouts)

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
        low, high = self.options.clip_ratio, self._clip_high
        found, is_clipped = policy_loss(log_probs, old, batch[ADVANTAGES], low=low, high=high)
        if self.beta:
            found = found + self.beta * divergence(log_probs, batch[REFERENCE])
        if bonus is not None:
            found = found - self._entropy_coeff * bonus
        loss = (found * weights).sum()
        values = {
            "entropy": -log_probs.detach() if bonus is None else bonus.detach(),
            "clip fraction": is_clipped,
            "ratio": (log_probs.detach() - old).exp(),
        }
        if self.needs_reference:
            values["kl"] = divergence(log_probs.detach(), batch[REFERENCE])
        mask, count = batch["loss_mask"], loss.new_tensor(int(batch["num_sequences"]))
        report = {name: masked_sum(each, mask) for name, each in values.items()}
        report["policy loss"] = torch.stack([loss.detach(), count])
        report["sampling difference"] = ((old - batch[SAMPLED]).abs() * mask).max()
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

    def dp_sum(self, values: Sequence[float]) -> list[float]:
        """Add up numbers over the data-parallel ranks."""
        from megatron.core import parallel_state

        row = torch.tensor(list(values), device=device.current().torch_device)
        torch.distributed.all_reduce(row, group=parallel_state.get_data_parallel_group())
        found: list[float] = row.tolist()
        return found

    def mean_lengths(self, batches: Sequence[Batch]) -> list[float]:
        """Return the mean length of completions in each update of a pass, over all ranks."""
        totals = []
        for part in self._parts(batches):
            totals.append(float(sum(int(batch["loss_mask"].sum()) for batch in part)))
            totals.append(float(len(part) * self.options.micro_batch_size))
        sums = self.dp_sum(totals)
        return [tokens / count for tokens, count in zip(sums[::2], sums[1::2])]

    # Helpers.

    def _next_prompts(self, batches: Iterator[Any], consumed: int) -> Iterator[Prompt]:
        dims, size = self.setup.dims, self.options.micro_batch_size
        for number, batch in enumerate(islice(batches, dims.num_micro_batches)):
            yield from split_prompts(batch, consumed + (number * dims.dp + dims.dp_rank) * size)

    def _parts(self, batches: Sequence[Batch]) -> list[Sequence[Batch]]:
        """Return the micro-batches of every update of a pass."""
        size = len(batches) // self.options.num_mini_batches
        return [batches[start : start + size] for start in range(0, len(batches), size)]

    def _assign_rewards(self, rollouts: Sequence[Rollout], batches: list[Batch]) -> None:
        def by_model(rollouts: Sequence[Rollout]) -> list[float] | None:
            def last_values(batch: Batch, values: torch.Tensor) -> torch.Tensor:
                return values.flatten()[batch[LAST_TOKENS]].float().cpu()

            found = self.collect(self.model("reward"), batches, last_values, has_labels=False)
            return torch.cat(found).tolist() if found else None

        assign_rewards(
            rollouts,
            self._scores or by_model,
            missing_eos_penalty=self.options.missing_eos_penalty,
        )

    def _report(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the metrics of rollouts, over all ranks."""
        rewards = [each.reward for each in rollouts]
        lengths = [len(each.completion.tokens) for each in rollouts]
        sums = self.dp_sum(
            [
                float(len(rollouts)),
                math.fsum(rewards),
                math.fsum(reward**2 for reward in rewards),
                float(sum(lengths)),
                float(sum(each.is_ended for each in rollouts)),
            ]
        )
        mean, square, length, ended = (total / sums[0] for total in sums[1:])
        return {
            "reward": mean,
            "reward std": math.sqrt(max(square - mean**2, 0.0)),
            "completion length": length,
            "ended": ended,
        }

    @property
    def _entropy_coeff(self) -> float:
        given = self.options.entropy_coeff
        return self.entropy_coeff if given is None else given

    @property
    def _clip_high(self) -> float:
        options = self.options
        return options.clip_ratio if options.clip_ratio_high is None else options.clip_ratio_high

    @property
    def _model_length(self) -> int:
        options = self.options
        return (
            options.seq_length
            or options.max_position_embeddings
            or self.setup.shape.max_position_embeddings
        )

    def _tokenizer_folder(self) -> str | None:
        folder = self.options.tokenizer_name_or_path or self.setup.config_folder
        return None if folder is None else str(folder)

    def _find_stop_ids(self) -> frozenset[int]:
        """Return the tokens that end a completion: those of the model and of the chat template."""
        found = self._data_stop_ids | eos_ids(self.setup.config_folder)
        if not found:
            raise ConfigError(
                "no token is known that ends a completion: the config.json of the model needs an "
                "eos_token_id"
            )
        return frozenset(found)

    def _text_scores(self) -> TextScores:
        options = self.options
        assert options.reward_fn is not None  # check_rollouts: one of the two is given
        facts = load_facts(self._tokenizer_folder(), cache_dir=options.cache_dir)
        return TextScores(options.reward_fn, options.reward_timeout, facts, self.stop_ids)

    def _reward_shape(self) -> ModelConfig:
        from mindspeed.checkpoint.detection import detect
        from mindspeed_llm.checkpoint.loading import config_folder
        from mindspeed_llm.models.registry import read_model_config

        source = self.options.reward_model
        assert source is not None
        shape = read_model_config(config_folder(detect(source)))
        if shape.num_labels != 1:
            held = f"{shape.num_labels} labels" if shape.num_labels else "no value head"
            raise ConfigError(
                f"--reward-model {source}: has {held}: give a model of --stage orm, or a "
                "sequence-classification model with 1 label"
            )
        if shape.vocab_size != self.setup.shape.vocab_size:
            raise ConfigError(
                f"--reward-model {source}: has {shape.vocab_size} tokens, the policy has "
                f"{self.setup.shape.vocab_size}: both need the same tokenizer"
            )
        return shape

    def _check_layout(self) -> None:
        options, dims = self.options, self.setup.dims
        refused = {
            "--num-layers-per-virtual-pipeline-stage": dims.vpp is not None,
            "--expert-model-parallel-size": dims.ep > 1,
            "--context-parallel-size": dims.cp > 1,
            "--sequence-parallel": options.sequence_parallel and dims.tp > 1,
        }
        for flag, is_given in refused.items():
            if is_given:
                raise ConfigError(
                    f"{flag}: --stage {options.stage} cannot sample completions in this layout: "
                    "drop it"
                )
        count = dims.num_micro_batches * self.group_size
        if count % options.num_mini_batches:
            raise ConfigError(
                f"--num-mini-batches {options.num_mini_batches}: a rank has {count} micro-batches "
                "of completions in a step, which cannot be divided by it"
            )

    def _check_lengths(self, data: Sequence[InstructionData]) -> None:
        options, longest = self.options, max(one.longest for one in data)
        limit, allowed = options.max_length, self._model_length
        if limit is not None and limit > allowed:
            raise ConfigError(
                f"--max-length {limit}: the model supports at most {allowed} tokens "
                "(--max-position-embeddings changes that)"
            )
        for one in data:
            one.check_length(options.max_prompt_length, "--max-prompt-length")
        if longest >= (limit or allowed):
            raise ConfigError(
                f"a prompt has {longest} tokens, and with its completion there may be "
                f"{limit or allowed}: preprocess with a lower --seq-length, or raise --max-length"
            )


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return what a mean over the tokens of all micro-batches is made of."""
    return torch.stack([(values.float() * mask).sum(), mask.sum().float()])


def merge_results(
    rollouts: dict[str, float], results: Sequence[StepResult], per_pass: int
) -> StepResult:
    """Return the result of a step of several updates: means of metrics, the tokens of a pass."""
    count = len(results)
    means = {
        name: sum(result.metrics[name] for result in results) / count for name in results[0].metrics
    }
    return StepResult(
        metrics=rollouts | means,
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
