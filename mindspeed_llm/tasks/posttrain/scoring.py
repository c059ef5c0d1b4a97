"""Rewards of completions, by a function of the user or by a reward model."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mindspeed import device
from mindspeed.config import ConfigError
from mindspeed_llm.data.tokenizer import TokenizerFacts
from mindspeed_llm.rewards.function import RewardFunction
from mindspeed_llm.tasks.posttrain.rollouts import Rollout

logger = logging.getLogger(__name__)

Parts = Mapping[str, Sequence[float]]
"""Rewards by the names of their parts, whose sum counts; one part without a name is named ""."""
Scores = Callable[[Sequence[Rollout]], Parts | None]
"""Returns the rewards on one rank of those that share a model, and nothing on the others."""


class TextScores:
    """Rewards by a function of texts; it runs beside one rank of those that share a model."""

    def __init__(
        self, function: str, timeout: float, facts: TokenizerFacts, stop_ids: frozenset[int]
    ) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(facts.backend)
        self._stop_ids = stop_ids
        self._function: RewardFunction | None = None
        error: ConfigError | None = None
        try:
            if is_scoring_rank():
                self._function = RewardFunction(function, timeout)
        except ConfigError as caught:
            error = caught
        raise_on_all(error)

    def __call__(self, rollouts: Sequence[Rollout]) -> Parts | None:
        """Return the rewards."""
        if self._function is None:
            return None
        prompts = [self._tokenizer.decode(list(each.prompt.tokens)) for each in rollouts]
        completions = [
            self._tokenizer.decode([t for t in each.completion.tokens if t not in self._stop_ids])
            for each in rollouts
        ]
        records = [each.prompt.fields for each in rollouts]
        names = dict.fromkeys(name for record in records for name in record)
        fields = {name: [record.get(name) for record in records] for name in names}
        return self._function(prompts, completions, fields)

    def close(self) -> None:
        """End the process of the function."""
        if self._function is not None:
            self._function.close()


def is_scoring_rank() -> bool:
    """Return whether this is the rank, of those that share a model, that computes rewards."""
    from megatron.core import parallel_state

    group = parallel_state.get_model_parallel_group()
    return bool(torch.distributed.get_rank(group) == 0)


def assign_rewards(
    rollouts: Sequence[Rollout], scores: Scores, *, missing_eos_penalty: float
) -> None:
    """Set the rewards of rollouts, the same on all ranks that share a model.

    What goes wrong on one rank is raised on all.
    """
    found: Parts | None = None
    error: ConfigError | None = None
    try:
        found = scores(rollouts)
        _check_finite(found)
    except ConfigError as caught:
        error = caught
    except Exception as caught:  # noqa: BLE001  # the other ranks wait for the rewards
        logger.debug("rewards", exc_info=True)
        error = ConfigError(f"rewards were not computed: {type(caught).__name__}: {caught}")
    given = raise_on_all(error, None if found is None else sorted(found))
    names = _common_names([each for each in given if each is not None])
    for rollout, rewards in zip(rollouts, _share(found, names, len(rollouts))):
        rollout.reward = sum(rewards) - (0.0 if rollout.is_ended else missing_eos_penalty)
        rollout.parts = {name: reward for name, reward in zip(names, rewards) if name}


def _common_names(given: Sequence[list[str]]) -> list[str]:
    """Return the names of parts, which all ranks that compute rewards have to give."""
    for names in given:
        if names != given[0]:
            one, other = (
                f"rewards named {', '.join(each)}" if any(each) else "one list of rewards"
                for each in (names, given[0])
            )
            raise ConfigError(
                f"--reward-fn returned {one} on one rank and {other} on another: return the same "
                "names in every call"
            )
    return given[0]


def _check_finite(parts: Parts | None) -> None:
    for rewards in zip(*(parts or {}).values()):
        # Ranks share them as float32, and their sum is trained.
        if not sum(map(abs, rewards)) <= torch.finfo(torch.float32).max:
            shown = " + ".join(map(str, rewards))
            raise ConfigError(f"a reward is {shown}: rewards must be finite numbers of 32 bits")


def raise_on_all(error: ConfigError | None, value: Any = None) -> list[Any]:
    """Raise on all ranks what the first of them has to raise, if any has; return all values."""
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (None if error is None else str(error), value))
    for text, _ in found:
        if text is not None:
            raise ConfigError(text)
    return [value for _, value in found]


def _share(parts: Parts | None, names: Sequence[str], count: int) -> list[list[float]]:
    """Return the rewards of the rank that has them: those of all parts for each completion."""
    from megatron.core import parallel_state

    rows = torch.full((count, len(names)), -math.inf)
    if parts is not None:
        rows = torch.tensor([list(parts[name]) for name in names], dtype=torch.float32).T
    rows = rows.contiguous().to(device.current().torch_device)
    group: Any = parallel_state.get_model_parallel_group()
    torch.distributed.all_reduce(rows, torch.distributed.ReduceOp.MAX, group=group)
    shared: list[list[float]] = rows.tolist()
    return shared
