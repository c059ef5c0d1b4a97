"""Which token comes next: the best one, or one drawn from what temperature, k and p leave."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rule:
    """How the next token is chosen."""

    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def filtered(logits: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return logits by temperature, and minus infinity where a token may not be drawn."""
    logits = logits / rule.temperature
    count = logits.shape[-1]
    if 0 < rule.top_k < count:
        lowest = logits.topk(rule.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    if rule.top_p < 1:
        ordered, places = logits.sort(descending=True, stable=True)
        shares = ordered.softmax(-1)
        # A token stays if those before it do not reach p yet, so the best one always stays.
        is_out = shares.cumsum(-1) - shares >= rule.top_p
        logits = logits.masked_fill(
            torch.zeros_like(is_out).scatter(-1, places, is_out), -torch.inf
        )
    return logits


class Chooser:
    """Chooses a token for each row; every row has random numbers of its own.

    So an answer depends on its prompt's number and on the seed, not on what else is in the batch.
    """

    def __init__(self, rule: Rule, first: int, count: int) -> None:
        self._rule = rule
        self._random = [torch.Generator().manual_seed(rule.seed + first + i) for i in range(count)]

    def choose(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the next token of each row that goes on."""
        if not self._rule.sample or self._rule.temperature == 0:
            return logits.argmax(-1)
        shares = filtered(logits, self._rule).softmax(-1).cpu()
        drawn = [
            torch.multinomial(share, 1, generator=self._random[row])
            for share, row in zip(shares, rows)
        ]
        return torch.cat(drawn)
