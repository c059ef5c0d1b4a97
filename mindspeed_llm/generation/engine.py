"""Generate completions of prompts token by token, on all ranks of a model."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mindspeed import device
from mindspeed_llm.generation.model import LoadedModel, to_device
from mindspeed_llm.generation.sampling import (
    BeamParams,
    BeamSearch,
    Sampler,
    SamplingParams,
)
from mindspeed_llm.generation.scoring import Score, ScoreRequest, score_rows
from mindspeed_llm.generation.static_decode import (
    StaticDecoders,
    read_blocks,
    unsupported_reason,
)

if TYPE_CHECKING:
    from mindspeed_llm.generation.inference import DecodeState

logger = logging.getLogger(__name__)

Step = list[tuple[int, int]]
"""The (prompt index, token) pairs of one decoding step."""


def never() -> bool:
    """Return False: never stop."""
    return False


@dataclass(frozen=True)
class Request:
    """A batch of prompts to complete."""

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: tuple[int, ...]
    """The limit of each completion."""
    stop_ids: frozenset[int]
    """Tokens that end a completion."""
    params: SamplingParams = SamplingParams()
    beams: BeamParams | None = None
    first: int | tuple[int, ...] = 0
    """The index of the first prompt, or that of every prompt; random seeds depend on it."""
    log_probs: bool = False
    """Whether the log-probabilities of tokens are asked for."""
    is_streamed: bool = False
    """Whether someone reads the tokens as they come."""

    def index(self, row: int) -> int:
        """Return the index of a prompt."""
        return self.first + row if isinstance(self.first, int) else self.first[row]


class RankCoordinator:
    """Broadcasts requests from rank 0, and sampled tokens from the sampling ranks, to all ranks.

    Data-parallel copies of the model share the rows of a request.
    """

    def __init__(self, model: LoadedModel) -> None:
        from megatron.core import parallel_state

        self.group = self._group()
        self.size = torch.distributed.get_world_size(self.group)
        self.is_rank_zero = torch.distributed.get_rank() == 0
        self.copy, self.num_copies = self._copies()
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.is_sampling_rank = model.is_last and tp_rank == 0
        """Whether this rank chooses tokens for its copy."""

    def _group(self) -> Any:
        """Return the ranks that generate together: all."""
        return None

    def _copies(self) -> tuple[int, int]:
        """Return the number of this rank's copy of the model, and how many there are."""
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group()
        return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)

    def share(self, count: int) -> range:
        """Return which of some rows this copy works on."""
        return range(self.copy, count, self.num_copies)

    def is_any_running(self, rows: Sequence[int]) -> bool:
        """Return whether this rank, or one whose experts it holds, still has rows to complete."""
        return bool(rows)

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        if self.size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def sync_choice(
        self,
        choice: torch.Tensor | None,
        shape: tuple[int, ...],
        stop: Callable[[], bool] = never,
        *,
        rows: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, bool]:
        """Return the sampling ranks' choices and whether rank 0 requests a stop.

        `rows` are those that this rank's choice is about, where other copies have the others. All
        travels as float32, which holds every token id, in one all-reduce a token.
        """
        is_stopped = self.is_rank_zero and stop()
        if self.size == 1:
            assert choice is not None
            return choice, is_stopped
        here = device.current().torch_device
        message = torch.full((1 + torch.Size(shape).numel(),), -torch.inf, device=here)
        message[0] = float(is_stopped)
        values = message[1:].view(shape)
        if choice is not None and rows is not None and len(rows) < len(values):
            values[list(rows)] = choice  # waits for the device, to which it brings the places
        elif choice is not None:
            values.copy_(choice)
        torch.distributed.all_reduce(message, torch.distributed.ReduceOp.MAX, group=self.group)
        return values, bool(message[0])


def shares_experts() -> bool:
    """Return whether ranks with other rows hold experts, or parts of them, of this one."""
    from megatron.core import parallel_state

    parts = parallel_state.get_expert_tensor_parallel_world_size()
    is_wider = parts > parallel_state.get_tensor_model_parallel_world_size()
    return parallel_state.get_expert_model_parallel_world_size() > 1 or is_wider


class Engine:
    """Works on all ranks: rank 0 calls `generate`, `score` and finally `close`, others `serve`."""

    def __init__(
        self, model: LoadedModel, *, cached: bool = True, static: bool | None = None
    ) -> None:
        self._model, self._cached = model, cached
        self._ranks = RankCoordinator(model)
        self._decoders = static_decoders(
            model, static if cached else False, num_copies=self._ranks.num_copies
        )

    @property
    def is_rank_zero(self) -> bool:
        """Return whether this is rank 0."""
        return self._ranks.is_rank_zero

    @property
    def num_copies(self) -> int:
        """The number of data-parallel copies of the model, which share the rows of a request."""
        return self._ranks.num_copies

    def generate(self, request: Request, stop: Callable[[], bool] = never) -> Iterator[Step]:
        """Yield the next tokens of the unfinished completions; exhaust the iterator.

        A completion ends with a stop token or at its limit, and all end when `stop` returns True.
        Beam search yields its tokens at the end.
        """
        self._ranks.broadcast(request)
        is_closed = False
        steps = self._steps(request, lambda: is_closed or stop())
        try:
            for step in steps:  # noqa: UP028  # these steps outlive a caller that stops iterating
                yield step
        finally:
            is_closed = True  # the other ranks end as well, and wait for the next request
            for _ in steps:
                pass

    def score(self, request: ScoreRequest) -> list[Score]:
        """Return what the model says about given tokens."""
        self._ranks.broadcast(request)
        return self._score(request)

    def serve(self) -> None:
        """Process the requests of rank 0 until it closes."""
        while (request := self._ranks.broadcast(None)) is not None:
            if isinstance(request, ScoreRequest):
                self._score(request)
            else:
                for _ in self._steps(request, never):
                    pass

    def close(self) -> None:
        """End `serve` on the other ranks."""
        self._ranks.broadcast(None)

    def _score(self, request: ScoreRequest) -> list[Score]:
        part, places = request.part(self._ranks.share(len(request.inputs)))
        found = None
        if part.inputs:
            tokens, padding = pad_prompts(part.inputs)
            state = decode_state(self._model, padding, len(tokens[0]), cached=False)
            logits = state.run(to_device(tokens), last=part.longest)
            if self._ranks.is_sampling_rank:
                assert logits is not None
                found = score_rows(logits, part)
        elif shares_experts():
            run_idle_step(self._model)
        scores, _ = self._ranks.sync_choice(found, (request.num_scored, 2), rows=places)
        return [Score(log_prob, bool(is_greedy)) for log_prob, is_greedy in scores.tolist()]

    def _steps(self, request: Request, stop: Callable[[], bool]) -> Iterator[Step]:
        if request.beams is None:
            return self._sample(request, stop)
        return self._search(request, request.beams, stop)

    def _sample(self, request: Request, stop: Callable[[], bool]) -> Iterator[Step]:
        if self._decoders is not None:
            steps = sample_static(self._decoders, request, stop)
        else:
            steps = sample_tokens(self._model, request, self._ranks, stop, cached=self._cached)
        for step in steps:
            yield [(one.row, one.token) for one in step]

    def _search(
        self, request: Request, beams: BeamParams, stop: Callable[[], bool]
    ) -> Iterator[Step]:
        for number, (prompt, limit) in enumerate(zip(request.prompts, request.max_new_tokens)):
            params = replace(request.params, seed=request.params.seed + request.index(number))
            search = BeamSearch(beams, params, request.stop_ids, limit)
            state = decode_state(self._model, [0], len(prompt) + limit, cached=self._cached)
            tokens, stopped = [list(prompt)], False
            while not (stopped or search.is_done):
                logits = state.step(to_device(tokens))
                proposed = None
                if self._ranks.is_sampling_rank and self._ranks.copy == 0:
                    assert logits is not None
                    proposed = search.propose(logits)
                found, stopped = self._ranks.sync_choice(proposed, (search.candidates, 3), stop)
                state.select_rows(search.advance(found))
                tokens = [[hypothesis.tokens[-1]] for hypothesis in search.running]
            for token in search.best.tokens:
                yield [(number, token)]
            if stopped:
                return


class SampledToken(NamedTuple):
    """The next token of a prompt."""

    row: int
    token: int
    log_prob: float
    """0 where log-probabilities are not asked for."""


def sample_tokens(
    model: LoadedModel,
    request: Request,
    ranks: RankCoordinator,
    stop: Callable[[], bool] = never,
    *,
    cached: bool = True,
) -> Iterator[list[SampledToken]]:
    """Yield the next tokens of the unfinished completions, the same on all ranks."""
    rows, left = list(range(len(request.prompts))), list(request.max_new_tokens)
    mine = list(ranks.share(len(rows)))
    if mine:
        tokens, padding = pad_prompts([request.prompts[row] for row in mine])
        capacity = len(tokens[0]) + max(request.max_new_tokens)
        state = decode_state(model, padding, capacity, cached=cached)
    sampler = Sampler(request.params, request.first, len(rows))
    while ranks.is_any_running(rows):
        choice = None
        if mine:
            logits = state.step(to_device(tokens))
            if ranks.is_sampling_rank:
                assert logits is not None
                choice = _choose(logits, sampler, mine, request)
        elif shares_experts():
            run_idle_step(model)
        if not rows:
            continue
        place = {row: number for number, row in enumerate(rows)}
        places = [place[row] for row in mine]
        chosen, stopped = ranks.sync_choice(choice, (len(rows), 2), stop, rows=places)
        step = [SampledToken(row, int(a), b) for row, (a, b) in zip(rows, chosen.tolist())]
        yield step
        if stopped:
            return
        for row in rows:
            left[row] -= 1
        found = {one.row: one.token for one in step}
        running = {row for row in rows if left[row] and found[row] not in request.stop_ids}
        rows = [row for row in rows if row in running]
        if mine:
            state.select_rows([index for index, row in enumerate(mine) if row in running])
        mine = [row for row in mine if row in running]
        tokens = [[found[row]] for row in mine]


def sample_static(
    decoders: StaticDecoders, request: Request, stop: Callable[[], bool] = never
) -> Iterator[list[SampledToken]]:
    """Yield the same tokens, decoded on fixed buffers by one rank."""
    prompts, padding = pad_prompts(request.prompts)
    count, left = max(request.max_new_tokens), list(request.max_new_tokens)
    sampler = Sampler(request.params, request.first, len(prompts))
    decoder = decoders.get(prompts, count, request.params, log_probs=request.log_probs)
    decoder.start(prompts, padding, sampler.draw(count))
    rows = list(range(len(prompts)))
    for tokens, log_probs in read_blocks(decoder, count, is_streamed=request.is_streamed):
        step = [SampledToken(row, tokens[row], log_probs[row]) for row in rows]
        yield step
        for row in rows:
            left[row] -= 1
        rows = [one.row for one in step if left[one.row] and one.token not in request.stop_ids]
        if stop() or not rows:
            break
    decoders.trim()


def static_decoders(
    model: LoadedModel, wanted: bool | None, *, num_copies: int = 1
) -> StaticDecoders | None:
    """Return what decodes on fixed buffers; by default where the device can record a step."""
    if wanted is None:
        wanted = device.current().can_record
    if not wanted:
        return None
    reason = unsupported_reason(model)
    if num_copies > 1:  # they share every token with each other
        reason = "copies of the model share the prompts"
    if reason is not None:
        logger.warning("decoding is slower, its steps cannot be recorded: %s", reason)
        return None
    return StaticDecoders(model)


def pad_prompts(prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """Pad prompts on the left to one length; return them and how much was added to each."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    return [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts)], padding


def _choose(
    logits: torch.Tensor, sampler: Sampler, rows: list[int], request: Request
) -> torch.Tensor:
    """Return the next token of each row and its log-probability (rows, 2)."""
    tokens, log_probs = sampler.sample(logits, rows, log_probs=request.log_probs)
    if log_probs is None:
        log_probs = torch.zeros_like(logits[:, 0])
    return torch.stack([tokens.float(), log_probs], 1)


def run_idle_step(model: LoadedModel) -> None:
    """Run a step whose result is not used: other ranks need the experts of this one."""
    decode_state(model, [0], 1, cached=False).step(to_device([[0]]))


def decode_state(
    model: LoadedModel, padding: list[int], capacity: int, *, cached: bool
) -> "DecodeState":
    """Return the state of decoding rows with this much padding."""
    from mindspeed_llm.generation.inference import DecodeState  # after the adaptor

    return DecodeState(model, padding, capacity, cached=cached)
