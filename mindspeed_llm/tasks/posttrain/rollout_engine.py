"""A rollout engine of the user's choice: `--rollout-engine path.py:function`.

The file is run in every rank. Its function gets the policy and returns an engine; what that samples
is checked before it is trained on.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.loading import hf_weights
from mindspeed_llm.generation.rollout import Completion, RolloutEngine, Sampling
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.rewards import worker
from mindspeed_llm.rewards.function import split_spec
from mindspeed_llm.tasks.posttrain.scoring import raise_on_all
from mindspeed_llm.training.lora import adapters_of
from mindspeed_llm.training.model import RoleModel, gather_parameters

logger = logging.getLogger(__name__)

FLAG = "--rollout-engine"


@dataclass(frozen=True)
class RolloutPolicy:
    """What an engine may want of the model that is trained."""

    model: RoleModel
    """This rank's part of it: Megatron's models, and what they are wrapped in."""
    shape: ModelConfig
    max_length: int
    """The most tokens of a prompt with its completion."""
    config_folder: Path | None
    """The folder with config.json and, usually, the tokenizer."""
    noop_layers: tuple[int, ...] = ()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the current weights with their Hugging Face names, each one whole, on the host.

        Ranks exchange their parts: all of them have to take all weights.
        """
        if adapters_of(self.model.chunks):
            raise ConfigError(
                f"{FLAG}: the weights of adapters are not merged while they are trained: drop "
                f"{FLAG}, or train all weights"
            )
        gather_parameters(self.model)
        yield from hf_weights(self.model.chunks, self.shape, self.noop_layers)


class EngineMaker:
    """Runs the file of --rollout-engine, and makes the engine when there is a policy."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        path, name = self._run(lambda: split_spec(spec, FLAG, "engines.py:make"))
        self._path = str(path.resolve())
        self._make = self._run(lambda: worker.load(self._path, name, "rollout_engine"))

    def __call__(self, policy: RolloutPolicy) -> RolloutEngine:
        """Return the engine for a policy."""
        engine = self._run(lambda: self._make(policy))
        if not callable(getattr(engine, "generate", None)):
            kind = type(engine).__name__
            raise ConfigError(
                f"{FLAG} {self._spec}: returned a {kind} without the method generate: return an "
                "engine"
            )
        return CheckedEngine(engine, self._run, policy.shape.vocab_size)

    def _run(self, function: Callable[[], Any]) -> Any:
        """Call code of the user's on all ranks; what one of them raises, all raise in one line."""
        found, error = None, None
        try:
            found = function()
        except ConfigError as caught:
            is_named = str(caught).startswith(FLAG)
            error = caught if is_named else ConfigError(f"{FLAG} {self._spec}: {caught}")
        except (Exception, SystemExit) as caught:  # noqa: BLE001  # other ranks wait
            logger.debug("rollout engine", exc_info=True)
            error = ConfigError(f"{FLAG} {self._spec}: {worker.explain(caught, self._path)}")
        raise_on_all(error)
        return found


class CheckedEngine:
    """Samples with an engine of the user's, and refuses what cannot be trained on."""

    def __init__(
        self, engine: RolloutEngine, run: Callable[[Callable[[], Any]], Any], vocab_size: int
    ) -> None:
        self._engine, self._run, self._vocab_size = engine, run, vocab_size

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, numbers: Sequence[int]
    ) -> list[Completion]:
        """Return a completion of every prompt."""

        def checked() -> list[Completion]:
            returned = list(self._engine.generate(prompts, sampling, numbers))
            if len(returned) != len(prompts):
                raise ConfigError(
                    f"returned {len(returned)} completions for {len(prompts)} prompts: return one "
                    "for each"
                )
            return [self._check(one, p, sampling) for one, p in zip(returned, prompts)]

        found: list[Completion] = self._run(checked)
        self._run(lambda: _check_same(found))
        return found

    def _check(self, one: Any, prompt: Sequence[int], sampling: Sampling) -> Completion:
        """Return a completion as numbers of Python."""
        if not isinstance(one, Completion):
            raise ConfigError(
                f"a completion is a {type(one).__name__}: return Completion(tokens, log_probs)"
            )
        tokens = tuple(map(int, one.tokens))
        log_probs = tuple(map(float, one.log_probs))
        limit = sampling.limit(prompt)
        if not 1 <= len(tokens) <= limit:
            raise ConfigError(f"a completion has {len(tokens)} tokens: it may have 1 to {limit}")
        if len(log_probs) != len(tokens):
            raise ConfigError(
                f"a completion has {len(tokens)} tokens and {len(log_probs)} log-probabilities: "
                "return one for each token"
            )
        for token, log_prob in zip(tokens, log_probs):
            if not 0 <= token < self._vocab_size:
                raise ConfigError(f"token {token}: the model has {self._vocab_size} tokens")
            if not math.isfinite(log_prob):
                raise ConfigError(f"the log-probability of token {token} is {log_prob}")
        if early := sampling.stop_ids.intersection(tokens[:-1]):
            raise ConfigError(
                f"a completion goes on after token {min(early)}, which ends it: return the tokens "
                "up to the first that ends it"
            )
        return Completion(tokens, log_probs)


def _check_same(found: Sequence[Completion]) -> None:
    """Raise where ranks that share a model were given different tokens."""
    from megatron.core import parallel_state

    group = parallel_state.get_model_parallel_group()
    tokens = repr([each.tokens for each in found])
    digests: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(
        digests, hashlib.sha256(tokens.encode()).hexdigest(), group=group
    )
    if len(set(digests)) > 1:
        raise ConfigError(
            "ranks that share a model got different completions: sample on one of them and "
            "broadcast, or derive random numbers from the seed and the number of a completion"
        )
