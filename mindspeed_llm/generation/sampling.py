"""Choose the next token: greedy, sampled with temperature, top-k and top-p, or by beam search."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch

from mindspeed.ops.draw_tokens import draw_tokens


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

    def sample(
        self, logits: torch.Tensor, rows: Sequence[int], *, log_probs: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the next token of each row that continues, and its log-probability if asked."""
        points = logits.new_zeros(len(rows), 1)
        if self._params.is_random:
            drawn = [torch.rand(1, generator=self._random[row]) for row in rows]
            points = torch.stack(drawn).to(logits.device)
        return pick_tokens(logits, points, self._params, log_probs=log_probs)

    def draw(self, count: int) -> torch.Tensor | None:
        """Return the numbers of the next `count` tokens (rows, count), None if none are needed."""
        if not self._params.is_random:
            return None
        return torch.stack([torch.rand(count, generator=random) for random in self._random])


def pick_tokens(
    logits: torch.Tensor, points: torch.Tensor, params: SamplingParams, *, log_probs: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the next token of each row, and its log-probability if that is asked for.

    `points` has a number from 0 to 1 for each row (rows, 1). The log-probability is that of the
    whole softmax at the temperature of sampling: top-k and top-p only choose among its tokens.
    """
    found = None
    if not params.is_random:
        tokens = logits.argmax(-1)
    elif is_filtered(params, logits.shape[-1]):
        tokens, _ = draw_tokens(filter_logits(logits.float(), params), points)
    else:
        tokens, found = draw_tokens(logits, points, params.temperature)
    if log_probs and found is None:
        every = _tempered(logits.float(), params).log_softmax(-1)
        found = every.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return tokens, found


def is_filtered(params: SamplingParams, count: int) -> bool:
    """Return whether some of `count` tokens cannot be sampled, whatever their logits are."""
    return 0 < params.top_k < count or params.top_p < 1


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
