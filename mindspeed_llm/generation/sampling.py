"""Choose the next token: greedy, sampled with temperature, top-k and top-p, or by beam search."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is sampled."""

    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def is_random(self) -> bool:
        """Whether tokens are sampled; else the best one is taken."""
        return self.sample and self.temperature != 0


SPAN = 128
"""Tokens whose probabilities are added up before one of them is chosen."""


def _tempered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return logits if params.temperature in (0, 1) else logits / params.temperature


def filter_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Scale logits by temperature, and mask tokens outside top-k and top-p with minus infinity."""
    logits = _tempered(logits, params)
    count = logits.shape[-1]
    if 0 < params.top_k < count:
        lowest = logits.topk(params.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    if params.top_p < 1:
        ordered, indices = logits.sort(descending=True, stable=True)
        probs = ordered.softmax(-1)
        # A token is kept if those before it do not reach p, so the best one is always kept.
        is_out = probs.cumsum(-1) - probs >= params.top_p
        logits = logits.masked_fill(
            torch.zeros_like(is_out).scatter(-1, indices, is_out), -torch.inf
        )
    return logits


class Sampler:
    """Samples a token for each row; every row has a random generator of its own.

    So a completion depends on its prompt's index and on the seed, not on the rest of the batch.
    """

    def __init__(self, params: SamplingParams, first: int | Sequence[int], count: int) -> None:
        self._params = params
        indices = range(first, first + count) if isinstance(first, int) else first
        self._random = [torch.Generator().manual_seed(params.seed + index) for index in indices]

    def sample(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the next token of each row that continues."""
        if not self._params.is_random:
            return logits.argmax(-1)
        drawn = [torch.rand(1, generator=self._random[row]) for row in rows]
        return pick_tokens(logits, torch.stack(drawn).to(logits.device), self._params)

    def draw(self, count: int) -> torch.Tensor | None:
        """Return the numbers of the next `count` tokens (rows, count), None if none are needed."""
        if not self._params.is_random:
            return None
        return torch.stack([torch.rand(count, generator=random) for random in self._random])


def pick_tokens(logits: torch.Tensor, points: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the next token of each row; `points` has a number from 0 to 1 for each (rows, 1).

    The token is the one whose share of the probabilities the number falls into: nothing waits for
    the host.
    """
    if not params.is_random:
        return logits.argmax(-1)
    probs = filter_logits(logits, params).softmax(-1)
    if missing := -probs.shape[-1] % SPAN:
        probs = F.pad(probs, (0, missing))
    # First a span of tokens, then a token of it: a running sum over a whole row is slow on a GPU.
    spans = probs.unflatten(-1, (-1, SPAN))
    return _tokens_at(points, spans, spans.sum(-1).cumsum(-1))


def _tokens_at(points: torch.Tensor, spans: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """Return the token of each row at a point (rows, 1) of the probabilities (rows, spans, SPAN).

    `totals` are the running sums of the spans (rows, spans).
    """
    points = points * totals[:, -1:]
    index = _share_of(points, totals)
    begin = F.pad(totals, (1, 0)).gather(1, index)
    span = spans.gather(1, index[..., None].expand(-1, -1, SPAN)).squeeze(1)
    tokens = index * SPAN + _share_of(points - begin, span.cumsum(-1))
    # Running sums are rounded: they may grow at a span in which no token can be chosen.
    probs = spans.flatten(1)
    best = probs.argmax(-1, keepdim=True)
    return torch.where(probs.gather(1, tokens) > 0, tokens, best).squeeze(-1)


def _share_of(points: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """Return the index of the share of running totals that each point falls into (rows, 1)."""
    # Rounding may bring a point up to the total, beyond the last share that is not empty.
    points = torch.minimum(points, totals[:, -1:].nextafter(totals.new_zeros(())))
    return torch.searchsorted(totals, points, right=True).clamp(max=totals.shape[-1] - 1)


def chosen_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, params: SamplingParams
) -> torch.Tensor:
    """Return the log-probability of each row's token at the temperature of sampling.

    That of the whole softmax: top-k and top-p only choose among its tokens.
    """
    log_probs = _tempered(logits, params).log_softmax(-1)
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class BeamParams:
    """The number of beams, and how finished hypotheses are scored."""

    count: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True)
class Hypothesis:
    """A completion or a prefix of one."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0


@dataclass
class BeamSearch:
    """The state of one search: the completions with the best sum of log-probabilities.

    The sum is divided by a power of the length. Every rank keeps the state, the sampling rank
    proposes candidates.
    """

    beams: BeamParams
    params: SamplingParams
    stop_ids: Set[int]
    max_new_tokens: int
    running: list[Hypothesis] = field(default_factory=lambda: [Hypothesis()])
    finished: list[Hypothesis] = field(default_factory=list)
    """The best finished hypotheses, best first."""

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.params.seed)

    @property
    def candidates(self) -> int:
        """Return the candidates of a step: enough to continue if many of them are stop tokens."""
        return max(2, 1 + len(self.stop_ids)) * self.beams.count

    def propose(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the best continuations, or sampled ones, as rows of (row, token, score)."""
        log_probs = logits.log_softmax(-1).cpu()
        if self.params.sample:
            log_probs = filter_logits(log_probs, self.params)
        scores = torch.tensor([hypothesis.score for hypothesis in self.running])
        total = (log_probs + scores[:, None]).flatten()
        count = min(self.candidates, int(total.isfinite().sum()))
        if self.params.sample:
            indices = total.softmax(-1).multinomial(count, generator=self._random)
        else:
            indices = total.topk(count).indices
        rows, tokens = indices // logits.shape[-1], indices % logits.shape[-1]
        found = torch.stack([rows.float(), tokens.float(), total[indices]], dim=1)
        missing = self.candidates - count
        return torch.nn.functional.pad(found, (0, 0, 0, missing), value=-1)

    def advance(self, candidates: torch.Tensor) -> list[int]:
        """Apply the candidates; return the rows that the running hypotheses continue."""
        continued: list[tuple[int, Hypothesis]] = []
        for position, (row, token, score) in enumerate(candidates.tolist()):
            if row < 0:
                break
            tokens = (*self.running[int(row)].tokens, int(token))
            if int(token) not in self.stop_ids and len(tokens) < self.max_new_tokens:
                continued.append((int(row), Hypothesis(tokens, score)))
            elif position < self.beams.count:
                self.finished.append(
                    Hypothesis(tokens, self._length_normalized(score, len(tokens)))
                )
        continued.sort(key=lambda item: -item[1].score)
        self.running = [hypothesis for _, hypothesis in continued[: self.beams.count]]
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.beams.count :]
        return [row for row, _ in continued[: self.beams.count]]

    @property
    def is_done(self) -> bool:
        """Return whether no running hypothesis can become better than the finished ones."""
        if not self.running:
            return True
        if len(self.finished) < self.beams.count:
            return False
        best = self.running[0]
        reachable = self._length_normalized(best.score, len(best.tokens))
        return self.beams.early_stopping or reachable <= self.finished[-1].score

    @property
    def best(self) -> Hypothesis:
        """Return the best finished hypothesis; in an interrupted search, the best running one."""
        return (self.finished or self.running)[0]

    def _length_normalized(self, score: float, length: int) -> float:
        return float(score / length**self.beams.length_penalty)
