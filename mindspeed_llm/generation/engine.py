"""Generate completions of prompts token by token, on all ranks of a model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mindspeed import device
from mindspeed_llm.generation.model import LoadedModel, to_device
from mindspeed_llm.generation.sampling import BeamParams, BeamSearch, Sampler, SamplingParams

if TYPE_CHECKING:
    from mindspeed_llm.generation.inference import DecodeState

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
    first: int = 0
    """The index of the first prompt; random seeds depend on it."""


class RankCoordinator:
    """Broadcasts requests from rank 0, and sampled tokens from the sampling rank, to all ranks."""

    def __init__(self, model: LoadedModel) -> None:
        from megatron.core import parallel_state

        self.size = torch.distributed.get_world_size()
        self.is_rank_zero = torch.distributed.get_rank() == 0
        is_replica = bool(
            parallel_state.get_tensor_model_parallel_rank()
            or parallel_state.get_data_parallel_rank()
        )
        self.is_sampling_rank = model.is_last and not is_replica

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        if self.size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def sync_choice(
        self, choice: torch.Tensor | None, shape: tuple[int, ...], stop: Callable[[], bool]
    ) -> tuple[torch.Tensor, bool]:
        """Return the sampling rank's choice and whether rank 0 requests a stop.

        Both travel as float32, which holds every token id, in one all-reduce a token.
        """
        is_stopped = self.is_rank_zero and stop()
        if self.size == 1:
            assert choice is not None
            return choice, is_stopped
        here = device.current().torch_device
        message = torch.full((1 + torch.Size(shape).numel(),), -torch.inf, device=here)
        message[0] = float(is_stopped)
        if choice is not None:
            message[1:] = choice.flatten()
        torch.distributed.all_reduce(message, torch.distributed.ReduceOp.MAX)
        return message[1:].view(shape), bool(message[0])


class Engine:
    """Generates on all ranks: rank 0 calls `generate` and finally `close`, the others `serve`."""

    def __init__(self, model: LoadedModel, *, cached: bool = True) -> None:
        self._model, self._cached = model, cached
        self._ranks = RankCoordinator(model)

    @property
    def is_rank_zero(self) -> bool:
        """Return whether this is rank 0."""
        return self._ranks.is_rank_zero

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

    def serve(self) -> None:
        """Process the requests of rank 0 until it closes."""
        while (request := self._ranks.broadcast(None)) is not None:
            for _ in self._steps(request, never):
                pass

    def close(self) -> None:
        """End `serve` on the other ranks."""
        self._ranks.broadcast(None)

    def _steps(self, request: Request, stop: Callable[[], bool]) -> Iterator[Step]:
        if request.beams is None:
            return self._sample(request, stop)
        return self._search(request, request.beams, stop)

    def _sample(self, request: Request, stop: Callable[[], bool]) -> Iterator[Step]:
        longest = max(map(len, request.prompts))
        padding = [longest - len(prompt) for prompt in request.prompts]
        tokens = [[0] * pad + list(prompt) for pad, prompt in zip(padding, request.prompts)]
        state = self._decode_state(padding, longest + max(request.max_new_tokens))
        rows, left = list(range(len(padding))), list(request.max_new_tokens)
        sampler = Sampler(request.params, request.first, len(rows))
        while rows:
            logits = state.step(to_device(tokens))
            choice = None
            if self._ranks.is_sampling_rank:
                assert logits is not None
                choice = sampler.sample(logits, rows)
            chosen, stopped = self._ranks.sync_choice(choice, (len(rows),), stop)
            step = list(zip(rows, map(int, chosen.tolist())))
            yield step
            if stopped:
                return
            for row in rows:
                left[row] -= 1
            running = [
                i
                for i, (row, token) in enumerate(step)
                if left[row] and token not in request.stop_ids
            ]
            state.select_rows(running)
            rows, tokens = [rows[i] for i in running], [[step[i][1]] for i in running]

    def _search(
        self, request: Request, beams: BeamParams, stop: Callable[[], bool]
    ) -> Iterator[Step]:
        for number, (prompt, limit) in enumerate(zip(request.prompts, request.max_new_tokens)):
            params = replace(request.params, seed=request.params.seed + request.first + number)
            search = BeamSearch(beams, params, request.stop_ids, limit)
            state = self._decode_state([0], len(prompt) + limit)
            tokens, stopped = [list(prompt)], False
            while not (stopped or search.is_done):
                logits = state.step(to_device(tokens))
                proposed = None
                if self._ranks.is_sampling_rank:
                    assert logits is not None
                    proposed = search.propose(logits)
                found, stopped = self._ranks.sync_choice(proposed, (search.candidates, 3), stop)
                state.select_rows(search.advance(found))
                tokens = [[hypothesis.tokens[-1]] for hypothesis in search.running]
            for token in search.best.tokens:
                yield [(number, token)]
            if stopped:
                return

    def _decode_state(self, padding: list[int], capacity: int) -> "DecodeState":
        from mindspeed_llm.generation.inference import DecodeState  # after the adaptor

        return DecodeState(self._model, padding, capacity, cached=self._cached)
