"""Rollouts: sampled completions of prompts with the log-probabilities of their tokens.

Reinforcement learning asks a `RolloutEngine` for them. The one here decodes with the model that is
trained, on its own weights; another one only has to have the same method.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mindspeed import device
from mindspeed_llm.generation.engine import (
    RankCoordinator,
    Request,
    sample_static,
    sample_tokens,
    shares_experts,
    static_decoders,
)
from mindspeed_llm.generation.model import LoadedModel
from mindspeed_llm.generation.sampling import SamplingParams
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.training.model import RoleModel, gather_parameters


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled, and where they end."""

    max_new_tokens: int
    max_length: int
    """The most tokens of a prompt with its completion."""
    stop_ids: frozenset[int]
    """Tokens that end a completion; they are part of it."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def limit(self, prompt: Sequence[int]) -> int:
        """Return the most tokens of a prompt's completion."""
        return min(self.max_new_tokens, self.max_length - len(prompt))


@dataclass(frozen=True)
class Completion:
    """The sampled tokens of a prompt, and the log-probability of each when it was sampled."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]


class RolloutEngine(Protocol):
    """Samples completions with the current weights of the policy."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, numbers: Sequence[int]
    ) -> list[Completion]:
        """Return a completion of every prompt.

        All ranks that share a model call this with the same prompts, and all get the same
        completions. What is sampled depends on the seed and the number of a completion, which is
        another for every completion of a run. Log-probabilities are those at the temperature.
        """


class ReplicaCoordinator(RankCoordinator):
    """Brings sampled tokens to the ranks that share one copy of the model."""

    def _group(self) -> Any:
        from megatron.core import parallel_state

        return parallel_state.get_model_parallel_group()

    def _copies(self) -> tuple[int, int]:
        return 0, 1

    def is_any_running(self, rows: Sequence[int]) -> bool:
        """Return whether this rank, or one whose experts it holds, still has rows to complete."""
        from megatron.core import parallel_state

        if not shares_experts():
            return bool(rows)
        running = torch.tensor([float(bool(rows))], device=device.current().torch_device)
        group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        torch.distributed.all_reduce(running, torch.distributed.ReduceOp.MAX, group=group)
        return bool(running)


class MegatronRollout:
    """Decodes with the model that is trained: the weights are not copied.

    For the time of a rollout its linear layers are those of inference, attention has a KV cache,
    and ranks do not share sequences. `batch_size` is the most prompts that are completed at a time,
    by default all.
    """

    def __init__(
        self,
        policy: RoleModel,
        shape: ModelConfig,
        max_length: int,
        batch_size: int | None = None,
        *,
        static: bool | None = None,
    ) -> None:
        self._policy, self._batch_size = policy, batch_size
        self._model = LoadedModel(tuple(policy.chunks), shape, max_length, None)
        self._ranks = ReplicaCoordinator(self._model)
        self._decoders = static_decoders(self._model, static)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, numbers: Sequence[int]
    ) -> list[Completion]:
        """Return a completion of every prompt."""
        from mindspeed_llm.generation.inference import prepare_decoding  # after the adaptor

        gather_parameters(self._policy)
        chunks, found = self._model.chunks, []
        was_training = chunks[0].training
        undo = [prepare_decoding(chunk.eval()) for chunk in chunks]
        try:
            size = self._batch_size or len(prompts)
            for first in range(0, len(prompts), size):
                few = slice(first, first + size)
                found += self._complete(prompts[few], sampling, numbers[few])
        finally:
            for chunk, restore in zip(chunks, undo):
                restore()
                chunk.train(was_training)
        return found

    @torch.no_grad()
    def _complete(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, numbers: Sequence[int]
    ) -> list[Completion]:
        request = Request(
            prompts=tuple(map(tuple, prompts)),
            max_new_tokens=tuple(map(sampling.limit, prompts)),
            stop_ids=sampling.stop_ids,
            params=SamplingParams(
                sample=True,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=sampling.seed,
            ),
            first=tuple(numbers),
            log_probs=True,
        )
        tokens: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        if self._decoders is not None:
            steps = sample_static(self._decoders, request)
        else:
            steps = sample_tokens(self._model, request, self._ranks)
        for step in steps:
            for one in step:
                tokens[one.row].append(one.token)
                log_probs[one.row].append(one.log_prob)
        return [Completion(tuple(a), tuple(b)) for a, b in zip(tokens, log_probs)]
