"""Sampled completions of prompts, and their rewards: the first half of a step of GRPO and PPO."""

import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, ClassVar

import torch

from mindspeed import device
from mindspeed.config import ConfigError, one_of
from mindspeed.training.checkpoint_dir import TrainState
from mindspeed_llm.data.instruction import InstructionData
from mindspeed_llm.data.stream import Sample
from mindspeed_llm.data.tokenizer import TokenizerFacts, load_facts
from mindspeed_llm.generation.rollout import MegatronRollout, RolloutEngine, Sampling
from mindspeed_llm.generation.text import eos_ids
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.tasks.posttrain.base import Batch
from mindspeed_llm.tasks.posttrain.completion_log import CompletionLog, drop_later
from mindspeed_llm.tasks.posttrain.reference import ReferenceTrainer
from mindspeed_llm.tasks.posttrain.rollout_engine import EngineMaker, RolloutPolicy
from mindspeed_llm.tasks.posttrain.rollouts import (
    LAST_TOKENS,
    Prompt,
    Rollout,
    collate_prompts,
    collate_rollouts,
    split_prompts,
    spread,
)
from mindspeed_llm.tasks.posttrain.rows import Rows
from mindspeed_llm.tasks.posttrain.scoring import Parts, TextScores, assign_rewards
from mindspeed_llm.training.data import on_first_rank
from mindspeed_llm.training.model import ModelRole

logger = logging.getLogger(__name__)

SAMPLED = "sampled_log_probs"
"""Where a micro-batch has the log-probabilities of sampling."""
EVALUATION = 1 << 31  # torch draws from the low 32 bits of a seed
"""Added to the numbers of completions that are sampled for an evaluation."""


class SamplingTrainer(ReferenceTrainer):
    """Samples completions of prompts with the policy as it is, and computes their rewards."""

    handler = "PPOAlpacaStyleInstructionHandler"
    data_kind: ClassVar[str] = "prompts"
    _scores: TextScores | None = None
    """What computes rewards, None for a reward model."""
    _completion_log: CompletionLog | None = None
    """What writes completions on the first rank, if they are asked for."""

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

    @cached_property
    def reference_fingerprint(self) -> str:
        """A digest of the reference's files, "" where the stage has no reference."""
        return super().reference_fingerprint if self.needs_reference else ""

    def model_shape(self, role: ModelRole) -> ModelConfig:
        """Return the sizes of a model; a reward model has those of its own config."""
        return self._reward_shape() if role.name == "reward" else super().model_shape(role)

    @property
    def longest_sample(self) -> int | None:
        """Longer prompts of data files are left out."""
        return self.options.max_prompt_length

    def initialize(self) -> None:
        """Build the models, and what samples completions and computes their rewards."""
        try:
            super().initialize()
            self.engine = self.make_engine()
        except BaseException:
            self._close_scores()
            raise

    def make_engine(self) -> RolloutEngine:
        """Return what samples completions: that of --rollout-engine, else this project's own."""
        limit = self.sampling.max_length
        if self._engine_maker is not None:
            folder, noops = self.setup.config_folder, self.options.noop_layers
            return self._engine_maker(
                RolloutPolicy(self.primary, self.setup.shape, limit, folder, noops)
            )
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
        """Check that prompts and completions fit, and run the files of the user's code."""
        spec = self.options.rollout_engine
        self._engine_maker = None if spec is None else EngineMaker(spec)
        self._check_mini_batches()
        self._check_lengths(data)
        self.rows = Rows.of(self.options, self.setup.shape, data)
        self._longest_prompt = max(one.longest for one in data)
        self.stop_ids = self._find_stop_ids(data)
        self._answer_end = find_answer_end(data) if self.options.reward_model else ()
        self._scores = None if self.options.reward_model else self._text_scores()
        if self.options.log_completions:
            self._completion_log = self._make_completion_log()

    @property
    def sizes(self) -> tuple[int, int]:
        """A row a completion, as long as the longest of the step."""
        return self.rows.length, self.options.micro_batch_size

    @property
    def longest(self) -> tuple[int, int]:
        """The longest prompt with the longest completion."""
        whole = self._longest_prompt + self.options.max_new_tokens
        limit = self.options.max_length or self._model_length
        return min(whole, limit), self.options.micro_batch_size

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Concatenate prompts; rows are made when they have completions."""
        return collate_prompts(samples)

    # Rollouts.

    def train(self) -> TrainState:
        """Train to the last step."""
        if self.options.save is not None and self.setup.dims.rank == 0:
            drop_later(self.options.save, self.training.state.iteration)
        try:
            return super().train()
        finally:
            self._close_scores()

    def _close_scores(self) -> None:
        if self._scores is not None:
            self._scores.close()

    def roll_out(self, batches: Iterator[Any], consumed: int) -> list[Rollout]:
        """Complete the prompts of the next global batch, each --num-generations times."""
        prompts = list(self._next_prompts(batches, consumed))
        self._rows = None  # of the micro-batch at work: there is none
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
        multiple, end = self.rows.multiple, self._answer_end
        longest = max(len(each.sample(end)["input_ids"]) for each in rollouts)
        self.rows = replace(self.rows, length=-(-longest // multiple) * multiple)
        batches: list[Batch] = []
        for few in self._micro_batches(rollouts):
            batch = collate_rollouts(few, self.rows)
            sampled = torch.tensor([p for each in few for p in each.completion.log_probs])
            batches.append(self.split(batch | {SAMPLED: spread(sampled, batch)}))
        return batches

    def score(self, rollouts: Sequence[Rollout], batches: list[Batch]) -> None:
        """Set the rewards of rollouts, by the function or by the reward model.

        A reward model sees answers as its own data had them: it scores the last token of the whole
        conversation, which may be a line break behind the token that ended the answer.
        """

        def by_model(rollouts: Sequence[Rollout]) -> Parts | None:
            def last_values(batch: Batch, values: torch.Tensor) -> torch.Tensor:
                return values.flatten()[batch[LAST_TOKENS]].float().cpu()

            rated = batches
            if self._answer_end:
                rated = [
                    self.split(collate_rollouts(few, self.rows, self._answer_end))
                    for few in self._micro_batches(rollouts)
                ]
            found = self.collect(self.model("reward"), rated, last_values, has_labels=False)
            return {"": torch.cat(found).tolist()} if found else None

        assign_rewards(
            rollouts,
            self._scores or by_model,
            missing_eos_penalty=self.options.missing_eos_penalty,
        )

    def log_completions(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        """Write the first completions of an iteration on all ranks, where they are asked for."""
        from megatron.core import parallel_state

        if not self.options.log_completions:
            return
        group: Any = parallel_state.get_data_parallel_group()
        few = list(rollouts[: self.options.log_completions])
        found: list[list[Rollout]] = [few] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(found, few, group=group)
        if self._completion_log is not None:
            # Ranks take turns in micro-batches.
            first = sorted(chain(*found), key=lambda each: each.prompt.number)
            self._completion_log.add(iteration, first)

    def report(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the metrics of rollouts, over all ranks."""
        rewards = [each.reward for each in rollouts]
        lengths = [len(each.completion.tokens) for each in rollouts]
        names = list(dict.fromkeys(name for each in rollouts for name in each.parts))
        sums = self.dp_sum(
            [
                float(len(rollouts)),
                math.fsum(rewards),
                float(sum(lengths)),
                float(sum(each.is_ended for each in rollouts)),
                *(math.fsum(each.parts.get(name, 0.0) for each in rollouts) for name in names),
            ]
        )
        mean, length, ended, *parts = (total / sums[0] for total in sums[1:])
        # Ranks add up float32 numbers: squares of large rewards would hide their differences.
        (spread_sum,) = self.dp_sum([math.fsum((reward - mean) ** 2 for reward in rewards)])
        return {
            "reward": mean,
            "reward std": math.sqrt(spread_sum / sums[0]),
            "completion length": length,
            "ended": ended,
            **{f"rewards/{name}": part for name, part in zip(names, parts)},
        }

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
                self.score(found, self.make_batches(found))
                rollouts += found
        finally:
            batches.close()
        return self.report(rollouts)

    def dp_sum(self, values: Sequence[float]) -> list[float]:
        """Add up numbers over the data-parallel ranks."""
        from megatron.core import parallel_state

        row = torch.tensor(list(values), device=device.current().torch_device)
        torch.distributed.all_reduce(row, group=parallel_state.get_data_parallel_group())
        found: list[float] = row.tolist()
        return found

    # Helpers.

    def _next_prompts(self, batches: Iterator[Any], consumed: int) -> Iterator[Prompt]:
        dims, size = self.setup.dims, self.options.micro_batch_size
        for number, batch in enumerate(islice(batches, dims.num_micro_batches)):
            yield from split_prompts(batch, consumed + (number * dims.dp + dims.dp_rank) * size)

    @property
    def _model_length(self) -> int:
        options = self.options
        return (
            options.seq_length
            or options.max_position_embeddings
            or self.setup.shape.max_position_embeddings
        )

    @cached_property
    def _tokenizer_facts(self) -> TokenizerFacts:
        """The tokenizer, which the first rank reads before the others do."""
        folder = self.options.tokenizer_name_or_path or self.setup.config_folder
        path = None if folder is None else str(folder)
        return on_first_rank(partial(load_facts, path, cache_dir=self.options.cache_dir))

    def _find_stop_ids(self, data: Sequence[InstructionData]) -> frozenset[int]:
        """Return the tokens that end a completion: those of the model and of the chat template."""
        found = {token for one in data for token in one.facts.get("stop_ids", ())}
        found |= eos_ids(self.setup.config_folder)
        if not found:
            raise ConfigError(
                "no token is known that ends a completion: the config.json of the model needs an "
                "eos_token_id"
            )
        return frozenset(found)

    def _micro_batches(self, rollouts: Sequence[Rollout]) -> Iterator[Sequence[Rollout]]:
        size = self.options.micro_batch_size
        for start in range(0, len(rollouts), size):
            yield rollouts[start : start + size]

    def _text_scores(self) -> TextScores:
        options = self.options
        assert options.reward_fn is not None  # check_rollouts: one of the two is given
        return TextScores(
            options.reward_fn, options.reward_timeout, self._tokenizer_facts, self.stop_ids
        )

    def _make_completion_log(self) -> CompletionLog | None:
        folder, count = self.options.save, self.options.log_completions
        assert folder is not None  # refused by options.check
        facts = self._tokenizer_facts  # by all ranks together
        return CompletionLog(folder, facts, count) if self.setup.dims.rank == 0 else None

    def _reward_shape(self) -> ModelConfig:
        from mindspeed.checkpoint.detection import detect
        from mindspeed_llm.checkpoint.loading import config_folder
        from mindspeed_llm.models.registry import read_model_config

        source = self.options.reward_model
        assert source is not None
        try:
            shape = read_model_config(config_folder(detect(source)))
        except ConfigError as error:
            raise ConfigError(f"--reward-model {error}") from None
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

    def _check_mini_batches(self) -> None:
        options, dims = self.options, self.setup.dims
        count = dims.num_micro_batches * self.group_size
        if count % options.num_mini_batches:
            allowed = one_of(size for size in range(1, count + 1) if not count % size)
            raise ConfigError(
                f"--num-mini-batches {options.num_mini_batches}: a rank has {count} micro-batches "
                f"of completions in a step, which cannot be divided by it: give {allowed}"
            )
        part = count // options.num_mini_batches
        if dims.vpp is not None and part % dims.pp:
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage: the {part} micro-batches of an update "
                f"are not a multiple of --pipeline-model-parallel-size {dims.pp}: use fewer "
                "--num-mini-batches, or a larger --global-batch-size"
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


def find_answer_end(data: Sequence[InstructionData]) -> tuple[int, ...]:
    """Return what the chat template puts behind the text of an answer, for a reward model."""
    known = [one.facts["answer_end_ids"] for one in data if "answer_end_ids" in one.facts]
    if len(known) < len(data):
        logger.warning(
            "--data-path: prompts of an earlier version do not note what their chat template ends "
            "an answer with, so the reward model may score another token than in its own "
            "training: preprocess them again"
        )
    found = set(map(tuple, known))
    if len(found) > 1:
        raise ConfigError(
            "--data-path: the data sets end answers differently, and a reward model scores the "
            "last token: preprocess them with one --prompt-type"
        )
    return found.pop() if found else ()
