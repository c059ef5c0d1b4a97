"""A loaded model with its tokenizer: complete a list of prompts, or hold a conversation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mindspeed.config import ConfigError
from mindspeed.distributed import environment
from mindspeed_llm.data.conversation import Message
from mindspeed_llm.generation.engine import Engine, Request, Step
from mindspeed_llm.generation.model import find_language_model, load_model
from mindspeed_llm.generation.options import GenerateOptions, as_training
from mindspeed_llm.generation.sampling import BeamParams, SamplingParams
from mindspeed_llm.generation.text import TextCodec, TextStream

INTERACTIVE_TIMEOUT_MINUTES = 60 * 24 * 365
"""How long ranks wait for the next line of a user."""


@dataclass(frozen=True)
class Completion:
    """The completion of one prompt."""

    task: str
    prompt: str
    text: str
    tokens: tuple[int, ...]
    end: Literal["stop", "length"]
    """The reason why it ended: a stop token or the length limit."""


@dataclass(frozen=True)
class Session:
    """The engine, the tokenizer and the limits of a loaded model."""

    options: GenerateOptions
    engine: Engine
    codec: TextCodec
    limit: int
    """The most tokens of a prompt with its completion."""
    vocab_size: int

    def max_new_tokens(self, prompt: Sequence[int]) -> int:
        """Return the limit of a completion; a prompt that leaves no tokens is an error."""
        if max(prompt) >= self.vocab_size:
            raise ConfigError(
                f"the prompt has token {max(prompt)}, the model has {self.vocab_size}: "
                "--tokenizer-name-or-path is that of another model"
            )
        if len(prompt) >= self.limit:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens, and with its completion there may be "
                f"{self.limit}: shorten it, or raise --max-length if the model allows it"
            )
        return min(self.options.max_new_tokens, self.limit - len(prompt))

    def request(self, task: str, prompts: Sequence[Sequence[int]], first: int = 0) -> Request:
        """Return the request of a task; `first` is the index of the first prompt."""
        options = self.options
        params = SamplingParams()
        if task not in ("greedy", "beam_search") and options.temperature > 0:
            params = SamplingParams(
                sample=True,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                seed=options.seed,
            )
        beams = BeamParams(options.num_beams, options.length_penalty, options.early_stopping)
        return Request(
            prompts=tuple(map(tuple, prompts)),
            max_new_tokens=tuple(map(self.max_new_tokens, prompts)),
            stop_ids=self.codec.stop_ids,
            params=params,
            beams=beams if task.startswith("beam_search") else None,
            first=first,
            is_streamed=task == "chat",
        )

    def answers(self, task: str, prompts: Sequence[str]) -> Iterator[Completion]:
        """Complete prompts in batches; all are checked before the first is run."""
        encoded = [self.codec.encode(prompt) for prompt in prompts]
        for ids in encoded:
            self.max_new_tokens(ids)
        size = self.options.batch_size * self.engine.num_copies
        for first in range(0, len(prompts), size):
            request = self.request(task, encoded[first : first + size], first)
            completions: list[list[int]] = [[] for _ in request.prompts]
            for step in self.engine.generate(request):
                for row, token in step:
                    completions[row].append(token)
            for prompt, tokens in zip(prompts[first:], completions):
                end: Literal["stop", "length"] = "stop"
                if tokens[-1] not in request.stop_ids:
                    end = "length"
                yield Completion(task, prompt, self.codec.decode(tokens), tuple(tokens), end)


def run_session(
    options: GenerateOptions, run: Callable[[Session], None], *, interactive: bool = False
) -> None:
    """Load the model and call `run` on rank 0; the other ranks serve its requests."""
    is_rank_zero = environment.is_rank_zero()
    # Before the weights, so that errors of the model, the tokenizer or the template come at once.
    folder = find_language_model(options.load, options.model_type_hf)
    codec = TextCodec(options, folder, interactive=interactive) if is_rank_zero else None
    training = as_training(options)
    if interactive:
        training = training.model_copy(
            update={"distributed_timeout_minutes": INTERACTIVE_TIMEOUT_MINUTES}
        )
    model = load_model(training)
    engine = Engine(model, cached=options.use_kv_cache)
    if codec is None:
        return engine.serve()
    try:
        limit = length_limit(options.max_length, model.max_length)
        run(Session(options, engine, codec, limit, model.config.vocab_size))
    finally:
        engine.close()


def length_limit(asked: int | None, supported: int) -> int:
    """Return the most tokens of a prompt with its completion."""
    if asked is not None and asked > supported:
        raise ConfigError(
            f"--max-length {asked}: the model supports at most {supported} tokens "
            "(--max-position-embeddings changes that)"
        )
    return asked or supported


class Conversation:
    """A multi-turn chat: keeps as much of the history as fits into the context."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._history: list[Message] = []
        self._asked = 0
        self.dropped = 0
        """Earlier turns that did not fit with the last question."""

    def clear(self) -> None:
        """Clear the history."""
        self._history.clear()

    def ask(self, question: str, stop: Callable[[], bool]) -> Iterator[str]:
        """Stream the answer until `stop` returns True, and add it to the history."""
        prompt = self._fit(Message("user", question))
        request = self._session.request("chat", [prompt], self._asked)
        self._asked += 1
        return self._stream(question, self._session.engine.generate(request, stop))

    def _stream(self, question: str, steps: Iterator[Step]) -> Iterator[str]:
        stream = TextStream(self._session.codec)
        for ((_, token),) in steps:
            if piece := stream.push(token):
                yield piece
        yield stream.flush()
        if stream.text.strip():  # a turn without an answer would confuse the next one
            self._history += [Message("user", question), Message("assistant", stream.text)]

    def _fit(self, question: Message) -> list[int]:
        """Encode the question after the newest turns that fit."""
        session = self._session
        turns = len(self._history) // 2
        kept = min(session.options.history_turns, turns)
        self._history = self._history[2 * (turns - kept) :]
        # Turns are dropped for an answer of full length, up to half of the context.
        wanted = min(session.options.max_new_tokens, session.limit // 2)
        self.dropped = 0
        while True:
            prompt = session.codec.encode_chat([*self._history, question])
            if len(prompt) + wanted <= session.limit or not self._history:
                return prompt
            del self._history[:2]
            self.dropped += 1
