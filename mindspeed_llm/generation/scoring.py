"""Log-probabilities of given tokens."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mindspeed_llm.generation.model import to_device


@dataclass(frozen=True)
class ScoreRequest:
    """A batch of sequences whose last tokens are scored."""

    sequences: tuple[tuple[int, ...], ...]
    num_scored: tuple[int, ...]
    """How many tokens at the end of each are scored: one at least, all but the first at most."""

    @property
    def inputs(self) -> list[tuple[int, ...]]:
        """What the model reads: what follows the last token is not asked for."""
        return [sequence[:-1] for sequence in self.sequences]


class Score(NamedTuple):
    """What a model says about the scored tokens of a sequence."""

    log_prob: float
    """The sum of theirs."""
    is_greedy: bool
    """Whether each of them is the most probable one."""


def score_rows(logits: torch.Tensor, request: ScoreRequest) -> torch.Tensor:
    """Return (rows, 2): the log-probability, and 1 where greedy decoding finds the same tokens.

    `logits` (rows, length, vocabulary) are those after each input; rows are padded on the left.
    """
    rows = zip(logits, request.sequences, request.num_scored, strict=True)
    return torch.stack([_score(row, sequence[-count:]) for row, sequence, count in rows])


def _score(logits: torch.Tensor, scored: tuple[int, ...]) -> torch.Tensor:
    wanted = to_device(scored)
    last = logits[-len(scored) :].float()
    found = last.log_softmax(-1).gather(-1, wanted[:, None]).sum()
    is_greedy = (last.argmax(-1) == wanted).all()
    return torch.stack([found, is_greedy.to(found.dtype)])
