"""Beam search: the answers with the best sum of log-probabilities, divided by a power of length."""

from collections.abc import Set
from dataclasses import dataclass, field

import torch

from mindspeed_llm.generation.sampling import Rule, filtered


@dataclass(frozen=True)
class Beams:
    """How many answers are followed at a time, and which of them is best."""

    count: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True)
class Hypothesis:
    """An answer or the beginning of one."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0


@dataclass
class BeamSearch:
    """The state of one search; every rank keeps it, the deciding one proposes candidates."""

    beams: Beams
    rule: Rule
    stops: Set[int]
    room: int
    """Tokens of the longest answer."""
    running: list[Hypothesis] = field(default_factory=lambda: [Hypothesis()])
    finished: list[Hypothesis] = field(default_factory=list)
    """The best whole answers, the best one first."""

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.rule.seed)

    @property
    def candidates(self) -> int:
        """How many candidates a step weighs: enough to go on if many of them are ends."""
        return max(2, 1 + len(self.stops)) * self.beams.count

    def propose(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the best continuations, or sampled ones, as rows of (row, token, score)."""
        shares = logits.log_softmax(-1).cpu()
        if self.rule.sample:
            shares = filtered(shares, self.rule)
        scores = torch.tensor([hypothesis.score for hypothesis in self.running])
        total = (shares + scores[:, None]).flatten()
        count = min(self.candidates, int(total.isfinite().sum()))
        if self.rule.sample:
            places = total.softmax(-1).multinomial(count, generator=self._random)
        else:
            places = total.topk(count).indices
        rows, tokens = places // logits.shape[-1], places % logits.shape[-1]
        found = torch.stack([rows.float(), tokens.float(), total[places]], dim=1)
        missing = self.candidates - count
        return torch.nn.functional.pad(found, (0, 0, 0, missing), value=-1)

    def advance(self, candidates: torch.Tensor) -> list[int]:
        """Take the candidates; return the rows that the hypotheses to follow come from."""
        going: list[tuple[int, Hypothesis]] = []
        for place, (row, token, score) in enumerate(candidates.tolist()):
            if row < 0:
                break
            tokens = (*self.running[int(row)].tokens, int(token))
            if int(token) not in self.stops and len(tokens) < self.room:
                going.append((int(row), Hypothesis(tokens, score)))
            elif place < self.beams.count:
                self.finished.append(Hypothesis(tokens, self._weighed(score, len(tokens))))
        going.sort(key=lambda item: -item[1].score)
        self.running = [hypothesis for _, hypothesis in going[: self.beams.count]]
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.beams.count :]
        return [row for row, _ in going[: self.beams.count]]

    @property
    def is_done(self) -> bool:
        """Whether nothing that is followed can become better than what is finished."""
        if not self.running:
            return True
        if len(self.finished) < self.beams.count:
            return False
        best = self.running[0]
        reachable = self._weighed(best.score, len(best.tokens))
        return self.beams.early_stopping or reachable <= self.finished[-1].score

    @property
    def best(self) -> Hypothesis:
        """Return the best whole answer; in an interrupted search, the best beginning of one."""
        return (self.finished or self.running)[0]

    def _weighed(self, score: float, length: int) -> float:
        return float(score / length**self.beams.length_penalty)
