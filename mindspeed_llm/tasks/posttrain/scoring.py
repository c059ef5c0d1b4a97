"""Rewards of completions, by a function of the user or by a reward model."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed import device
from mindspeed.config import ConfigError
from mindspeed_llm.data.tokenizer import TokenizerFacts
from mindspeed_llm.rewards.function import RewardFunction
from mindspeed_llm.tasks.posttrain.rollouts import Rollout

logger = logging.getLogger(__name__)

Scores = Callable[[Sequence[Rollout]], Sequence[float] | None]
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

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float] | None:
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
    found: Sequence[float] | None = None
    error: ConfigError | None = None
    try:
        found = scores(rollouts)
        _check_finite(found)
    except ConfigError as caught:
        error = caught
    except Exception as caught:  # noqa: BLE001  # the other ranks wait for the rewards
        logger.debug("rewards", exc_info=True)
        error = ConfigError(f"rewards were not computed: {type(caught).__name__}: {caught}")
    raise_on_all(error)
    for rollout, reward in zip(rollouts, _share(found, len(rollouts))):
        rollout.reward = reward - (0.0 if rollout.is_ended else missing_eos_penalty)


def _check_finite(rewards: Sequence[float] | None) -> None:
    for reward in rewards or ():
        # Ranks share them as float32.
        if not abs(reward) <= torch.finfo(torch.float32).max:
            raise ConfigError(f"a reward is {reward}: rewards must be finite numbers of 32 bits")


def raise_on_all(error: ConfigError | None) -> None:
    """Raise on all ranks what the first of them has to raise, if any has."""
    found: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, None if error is None else str(error))
    for text in filter(None, found):
        raise ConfigError(text)


def _share(rewards: Sequence[float] | None, count: int) -> list[float]:
    """Return the rewards of the rank that has them."""
    from megatron.core import parallel_state

    row = torch.full((count,), -math.inf)
    if rewards is not None:
        row = torch.tensor(list(rewards), dtype=torch.float32)
    row = row.to(device.current().torch_device)
    group: Any = parallel_state.get_model_parallel_group()
    torch.distributed.all_reduce(row, torch.distributed.ReduceOp.MAX, group=group)
    shared: list[float] = row.tolist()
    return shared
