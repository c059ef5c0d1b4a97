"""Log-probabilities of given tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from mindspeed_llm.generation.model import to_device


@dataclass(frozen=True)
class ScoreRequest:
    """A batch of inputs, each with the token sequences whose scores are asked for behind it.

    The tokens of a sequence but the last are the last of the input: what one reads of it, answers
    that differ in their last token share.
    """

    inputs: tuple[tuple[int, ...], ...]
    scored: tuple[tuple[tuple[int, ...], ...], ...]
    """For each input; none of them is empty, or longer than the input."""

    @property
    def num_scored(self) -> int:
        """The number of sequences."""
        return sum(map(len, self.scored))

    def part(self, rows: Sequence[int]) -> tuple["ScoreRequest", list[int]]:
        """Return the request of some inputs, and the numbers of their sequences in this one."""
        first = [0, *accumulate(map(len, self.scored))]
        part = ScoreRequest(
            tuple(self.inputs[row] for row in rows), tuple(self.scored[row] for row in rows)
        )
        return part, [number for row in rows for number in range(first[row], first[row + 1])]

    @property
    def longest(self) -> int:
        """The most tokens of a sequence: no more logits are needed of a row."""
        return max(len(tokens) for row in self.scored for tokens in row)


def rows_by_input(
    sequences: Iterable[tuple[int, Sequence[int]]],
) -> dict[tuple[int, ...], list[int]]:
    """Return which of some numbered sequences have the same input: all of it but the last token.

    Answers of one token to one question do, and others that differ in their last token only.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, sequence in sequences:
        rows.setdefault(tuple(sequence[:-1]), []).append(number)
    return rows


class Score(NamedTuple):
    """What a model says about the scored tokens of a sequence."""

    log_prob: float
    """The sum of theirs."""
    is_greedy: bool
    """Whether each of them is the most probable one."""


def score_rows(logits: torch.Tensor, request: ScoreRequest) -> torch.Tensor:
    """Return (sequences, 2): log-probability, and 1 where greedy decoding finds the same tokens.

    `logits` (rows, length, vocabulary) are those after the last tokens of each input.
    """
    return torch.cat([_score(row, scored) for row, scored in zip(logits, request.scored)])


def _score(logits: torch.Tensor, scored: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    last = logits[-max(map(len, scored)) :].float()
    greedy, log_probs, found = last.argmax(-1), last.log_softmax(-1), []
    for tokens in scored:
        wanted = to_device(tokens)
        log_prob = log_probs[-len(tokens) :].gather(-1, wanted[:, None]).sum()
        is_greedy = (greedy[-len(tokens) :] == wanted).all()
        found.append(torch.stack([log_prob, is_greedy.to(log_prob.dtype)]))
    return torch.stack(found)
