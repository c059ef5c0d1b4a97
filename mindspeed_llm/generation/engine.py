"""Answers to prompts, step by step, on all ranks of a layout."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mindspeed_llm.generation.beam import Beams, BeamSearch
from mindspeed_llm.generation.crew import Crew
from mindspeed_llm.generation.model import LoadedModel, here
from mindspeed_llm.generation.reading import Reading
from mindspeed_llm.generation.sampling import Chooser, Rule

Step = list[tuple[int, int]]
"""Which prompt is answered by which next token."""


def never() -> bool:
    """Do not stop."""
    return False


@dataclass(frozen=True)
class Request:
    """Prompts to answer together."""

    prompts: tuple[tuple[int, ...], ...]
    rooms: tuple[int, ...]
    """The most tokens of each answer."""
    stops: frozenset[int]
    """Tokens that end an answer."""
    rule: Rule = Rule()
    beams: Beams | None = None
    first: int = 0
    """The number of the first prompt; random numbers depend on it."""


class Engine:
    """Generates; the first rank calls `answer` and at last `close`, the others `follow`."""

    def __init__(self, model: LoadedModel, *, cached: bool = True) -> None:
        self._model, self._cached = model, cached
        self._crew = Crew(model)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank."""
        return self._crew.is_leader

    def answer(self, request: Request, stop: Callable[[], bool] = never) -> Iterator[Step]:
        """Yield the next tokens of the answers that go on; run it to its end.

        An answer ends with a stop token, when its room is full, or, all at once, when `stop` says
        so. Beam search has its tokens only at the end.
        """
        self._crew.share(request)
        is_left = False
        steps = self._steps(request, lambda: is_left or stop())
        try:
            for step in steps:  # noqa: UP028  # these steps outlive a caller who leaves
                yield step
        finally:
            is_left = True  # the other ranks end here, too, and wait for the next request
            for _ in steps:
                pass

    def follow(self) -> None:
        """Do what the first rank asks for until it closes."""
        while (request := self._crew.share(None)) is not None:
            for _ in self._steps(request, never):
                pass

    def close(self) -> None:
        """Let the other ranks go."""
        self._crew.share(None)

    def _steps(self, request: Request, stop: Callable[[], bool]) -> Iterator[Step]:
        if request.beams is None:
            return self._choose(request, stop)
        return self._search(request, request.beams, stop)

    def _choose(self, request: Request, stop: Callable[[], bool]) -> Iterator[Step]:
        longest = max(map(len, request.prompts))
        padding = [longest - len(prompt) for prompt in request.prompts]
        tokens = [[0] * pad + list(prompt) for pad, prompt in zip(padding, request.prompts)]
        reading = self._open(padding, longest + max(request.rooms))
        rows, left = list(range(len(padding))), list(request.rooms)
        chooser = Chooser(request.rule, request.first, len(rows))
        while rows:
            logits = reading.read(here(tokens))
            choice = None
            if self._crew.decides:
                assert logits is not None
                choice = chooser.choose(logits, rows)
            chosen, stopped = self._crew.agree(choice, (len(rows),), stop)
            step = list(zip(rows, map(int, chosen.tolist())))
            yield step
            if stopped:
                return
            for row in rows:
                left[row] -= 1
            going = [
                i for i, (row, token) in enumerate(step) if left[row] and token not in request.stops
            ]
            reading.keep(going)
            rows, tokens = [rows[i] for i in going], [[step[i][1]] for i in going]

    def _search(self, request: Request, beams: Beams, stop: Callable[[], bool]) -> Iterator[Step]:
        for number, (prompt, room) in enumerate(zip(request.prompts, request.rooms)):
            rule = replace(request.rule, seed=request.rule.seed + request.first + number)
            search = BeamSearch(beams, rule, request.stops, room)
            reading = self._open([0], len(prompt) + room)
            tokens, stopped = [list(prompt)], False
            while not (stopped or search.is_done):
                logits = reading.read(here(tokens))
                proposed = None
                if self._crew.decides:
                    assert logits is not None
                    proposed = search.propose(logits)
                found, stopped = self._crew.agree(proposed, (search.candidates, 3), stop)
                reading.keep(search.advance(found))
                tokens = [[hypothesis.tokens[-1]] for hypothesis in search.running]
            for token in search.best.tokens:
                yield [(number, token)]
            if stopped:
                return

    def _open(self, padding: list[int], capacity: int) -> Reading:
        return Reading(self._model, padding, capacity, cached=self._cached)
