"""Decode on buffers that stay where they are: a GPU records one step and replays it.

All that a step reads and writes lies on the device: tokens, their position, the number of the step,
random numbers, the KV cache and what was sampled. The host reads the result in blocks of tokens,
while the device runs the next block. So rows that have ended go on for a while, and what they
sample is dropped.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mindspeed import device
from mindspeed_llm.generation.model import LoadedModel, to_device
from mindspeed_llm.generation.sampling import SamplingParams, is_filtered, pick_tokens

logger = logging.getLogger(__name__)

BLOCK, STREAM_BLOCK = 8, 1
"""Tokens of a row that the host reads at a time; fewer where someone reads along."""
CAPACITY_MULTIPLE = 64
"""Prompts of almost the same length use the same recorded step."""
KEPT_BYTES = 1 << 30
"""The most memory that is kept from one call to the next, for its recorded step."""
LOGITS_KEPT, SORTED_KEPT = 3, 12
"""Float32 arrays of the logits' size in the memory of a recorded step: those of log-probabilities,
and with top-k or top-p sorted ones, 64-bit indices and running sums: an estimate, not measured."""
Block = tuple[list[list[int]], list[list[float]]]


def unsupported_reason(model: LoadedModel) -> str | None:
    """Return why a model cannot decode on fixed buffers, or None if it can."""
    from megatron.core import parallel_state

    from mindspeed.te.pytorch.attention.dot_product_attention import DotProductAttention

    if parallel_state.get_model_parallel_group().size() > 1 or len(model.chunks) > 1:
        return "several ranks or pipeline stages share the model"
    config = model.chunks[0].config
    if config.num_moe_experts is not None:
        return "the host sends tokens to experts"
    if config.multi_latent_attention:
        return "it has latent attention"
    for layer in model.chunks[0].decoder.layers:
        if (attention := getattr(layer, "self_attention", None)) is None:
            continue  # a layer that does nothing
        core = attention.core_attention
        if not isinstance(core, DotProductAttention):
            return "--transformer-impl is local"
        window: Any = core.window_size
        if tuple(window) not in ((-1, -1), (-1, 0)) or core.alibi_slopes is not None:
            return "its attention has a window or ALiBi"
    return None


class StaticDecoder:
    """Samples tokens of a fixed number of rows; `start`, then `advance` as often as needed."""

    def __init__(
        self,
        model: LoadedModel,
        size: tuple[int, int, int],
        params: SamplingParams,
        *,
        log_probs: bool,
    ) -> None:
        # After the adaptor: these import Megatron.
        from mindspeed_llm.generation.decode_step import decode_step
        from mindspeed_llm.generation.inference import DecodeState

        rows, capacity, count = size
        here = device.current().torch_device
        self._model = model
        self._params, self._log_probs = params, log_probs
        self._state = DecodeState(model, [0] * rows, capacity)
        self._run = decode_step(model, self._state)
        self._tokens = torch.zeros(rows, 1, dtype=torch.int64, device=here)
        self._position, self._number = (torch.zeros_like(self._tokens[0]) for _ in range(2))
        self._draws = torch.zeros(rows, count, device=here)
        self._found = torch.zeros(rows, count, dtype=torch.int64, device=here)
        self._found_log_probs = torch.zeros(rows, count, device=here)
        vocab_size = model.config.vocab_size
        kept = SORTED_KEPT if is_filtered(params, vocab_size) else LOGITS_KEPT
        self._logits_bytes = kept * rows * vocab_size * torch.float32.itemsize
        self._replay: Any = None
        self._recorded_weights: tuple[int, ...] | None = None

    @property
    def is_current(self) -> bool:
        """Whether the weights still are where a recorded step, if there is one, reads them."""
        return self._recorded_weights in (None, self._weights())

    def _weights(self) -> tuple[int, ...]:
        return tuple(each.data_ptr() for each in self._model.chunks[0].parameters())

    @property
    def kept_bytes(self) -> int:
        """The bytes of the KV cache, and about those of what a recorded step computes."""
        return self._state.cache_bytes + self._logits_bytes

    @torch.no_grad()
    def start(
        self, prompts: Sequence[Sequence[int]], padding: Sequence[int], draws: torch.Tensor | None
    ) -> None:
        """Run the prompts, which are padded on the left, and sample the first token."""
        self._state.restart(padding)
        logits = self._state.step(to_device(prompts))
        assert logits is not None  # there is one pipeline stage
        self._state.clear_unused()
        if draws is not None:
            self._draws.copy_(draws)
        self._position.fill_(len(prompts[0]))
        self._number.zero_()
        self._choose(logits)

    @torch.no_grad()
    def advance(self) -> None:
        """Sample the next token of all rows; nothing waits for the device."""
        if self._replay is None:
            # Not earlier: the prompts' forward pass moves the weights that adapters are beside.
            self._recorded_weights = self._weights()
            self._replay = self._record()
        self._replay()

    def read_later(self, begin: int, end: int) -> Callable[[], Block]:
        """Copy some tokens of every row, and their log-probabilities, to the host.

        Returns a function that waits for the copies alone, not for steps that were queued later.
        """
        here = device.current()
        parts = self._found[:, begin:end], self._found_log_probs[:, begin:end]
        copies = [here.host_buffer(x.nbytes).view(x.dtype).view(x.shape) for x in parts]
        for copy, part in zip(copies, parts):
            copy.copy_(part, non_blocking=True)
        event = here.event()
        event.record()

        def wait() -> Block:
            event.synchronize()
            tokens, log_probs = copies
            return tokens.tolist(), log_probs.tolist()

        return wait

    def _step(self) -> None:
        logits = self._logits()
        self._position += 1
        self._choose(logits)

    def _logits(self) -> torch.Tensor:
        """Run the fused step, or Megatron's once a kernel of it does not fit the device.

        A step that fails has written nothing but its own position of the KV cache.
        """
        try:
            return self._run(self._tokens, self._position)
        except errors_of_large_kernels() as error:
            if self._run == self._state.step_at:
                raise
            logger.warning("decoding is slower, a fused kernel does not fit the device: %s", error)
            self._run = self._state.step_at
            return self._run(self._tokens, self._position)

    def _choose(self, logits: torch.Tensor) -> None:
        points = self._draws.index_select(1, self._number)
        tokens, log_probs = pick_tokens(logits, points, self._params, log_probs=self._log_probs)
        self._tokens.copy_(tokens[:, None])
        self._found.index_copy_(1, self._number, tokens[:, None])
        if log_probs is not None:
            self._found_log_probs.index_copy_(1, self._number, log_probs[:, None])
        self._number += 1

    def _record(self) -> Any:
        """Return what replays a step; recording one may run it, so the counters are put back."""
        counters = (self._tokens, self._position, self._number)
        before = [each.clone() for each in counters]
        try:
            return device.current().record(self._step)
        except RuntimeError as error:
            if device.current().is_out_of_memory(error):
                raise
            logger.warning("decoding is slower, its steps cannot be recorded: %s", error)
            return self._step
        finally:
            for each, value in zip(counters, before):
                each.copy_(value)


def errors_of_large_kernels() -> tuple[type[Exception], ...]:
    """Return what a launch raises that needs more shared memory or threads than there are."""
    if importlib.util.find_spec("triton") is None:
        return ()
    from triton.runtime.errors import OutOfResources

    return (OutOfResources,)


class StaticDecoders:
    """Makes the decoders of one model, and keeps the last for calls of the same size."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._kept: tuple[Any, StaticDecoder] | None = None

    def get(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        params: SamplingParams,
        *,
        log_probs: bool,
    ) -> StaticDecoder:
        """Return a decoder for prompts of one padded length, and `count` tokens after them."""
        needed = len(prompts[0]) + count
        capacity = -(-needed // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
        size, params = (len(prompts), capacity, count), replace(params, seed=0)
        key = (size, params, log_probs)
        if self._kept is None or self._kept[0] != key or not self._kept[1].is_current:
            self._kept = None  # its memory is free before there is a new one
            self._kept = key, StaticDecoder(self._model, size, params, log_probs=log_probs)
        return self._kept[1]

    def trim(self) -> None:
        """Free a decoder that is too large to be kept while the model is trained."""
        if self._kept is not None and self._kept[1].kept_bytes > KEPT_BYTES:
            self._kept = None


def read_blocks(
    decoder: StaticDecoder, count: int, *, is_streamed: bool = False
) -> Iterator[tuple[list[int], list[float]]]:
    """Yield the tokens of all rows and their log-probabilities, step by step.

    `decoder` has sampled the first of `count`. A block is read when the next one is queued, so that
    the device does not wait for the host; the first token of a stream is read at once.
    """
    sampled, size = 1, STREAM_BLOCK if is_streamed else BLOCK
    waiting: list[Callable[[], Block]] = []
    for begin in range(0, count, size):
        end = min(begin + size, count)
        for _ in range(sampled, end):
            decoder.advance()
        sampled = end
        waiting.append(decoder.read_later(begin, end))
        is_first_of_stream = is_streamed and begin == 0
        while len(waiting) > (0 if is_first_of_stream or end == count else 1):
            tokens, log_probs = waiting.pop(0)()
            yield from ((list(a), list(b)) for a, b in zip(zip(*tokens), zip(*log_probs)))
