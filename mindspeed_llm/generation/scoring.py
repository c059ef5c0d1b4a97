"""Log-probabilities of given tokens, on all ranks of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mindspeed_llm.generation.model import LoadedModel, to_device


@dataclass(frozen=True)
class ScoreRequest:
    """A batch of sequences whose last tokens are scored."""

    sequences: tuple[tuple[int, ...], ...]
    num_scored: tuple[int, ...]
    """How many tokens at the end of each are scored: all but the first at most."""


class Score(NamedTuple):
    """What a model says about the scored tokens of a sequence."""

    log_prob: float
    """The sum of theirs."""
    is_greedy: bool
    """Whether each of them is the most probable one."""


@torch.no_grad()
def score_rows(model: LoadedModel, request: ScoreRequest) -> torch.Tensor | None:
    """Return (rows, 2): the log-probability, and 1 where greedy decoding finds the same tokens.

    Only ranks of the last pipeline stage have it, others return None.
    """
    from mindspeed_llm.generation.engine import decode_state, pad_prompts

    # What follows the last token is not asked for.
    tokens, padding = pad_prompts([sequence[:-1] for sequence in request.sequences])
    state = decode_state(model, padding, len(tokens[0]), cached=False)
    logits = state.run(to_device(tokens))
    if logits is None:
        return None
    rows = zip(logits, request.sequences, request.num_scored, strict=True)
    return torch.stack([_score(row, sequence[-count:]) for row, sequence, count in rows])


def _score(logits: torch.Tensor, scored: Sequence[int]) -> torch.Tensor:
    """Score the last tokens of a row by the logits (length, vocabulary) at its end."""
    wanted = to_device(scored)
    last = logits[-len(scored) :].float()
    found = last.log_softmax(-1).gather(-1, wanted[:, None]).sum()
    is_greedy = (last.argmax(-1) == wanted).all()
    return torch.stack([found, is_greedy.to(found.dtype)])
