"""A model that is ready to answer, and the answers to a list of prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mindspeed.checkpoint.detection import detect
from mindspeed.config import ConfigError
from mindspeed.distributed import environment
from mindspeed_llm.generation.beam import Beams
from mindspeed_llm.generation.engine import Engine, Request
from mindspeed_llm.generation.model import load_model
from mindspeed_llm.generation.options import GenerateOptions, as_training
from mindspeed_llm.generation.sampling import Rule
from mindspeed_llm.generation.text import Text

TALKING_MINUTES = 60 * 24 * 365
"""How long ranks wait for a person to type."""


@dataclass(frozen=True)
class Answer:
    """What the model says to one prompt."""

    task: str
    prompt: str
    text: str
    tokens: tuple[int, ...]
    end: Literal["stop", "length"]
    """Whether it came to its end or to the longest that was allowed."""


@dataclass(frozen=True)
class Session:
    """The model, the tokenizer and how long they may go on together."""

    options: GenerateOptions
    engine: Engine
    text: Text
    limit: int
    """The most tokens of a prompt with its answer."""
    vocab_size: int

    def room(self, prompt: Sequence[int]) -> int:
        """Return how many tokens an answer may have; a prompt that leaves none is an error."""
        if max(prompt) >= self.vocab_size:
            raise ConfigError(
                f"the prompt has token {max(prompt)}, the model knows {self.vocab_size}: "
                "--tokenizer-name-or-path is that of another model"
            )
        if len(prompt) >= self.limit:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens, and with its answer there may be "
                f"{self.limit}: shorten it, or raise --max-length if the model allows it"
            )
        return min(self.options.max_new_tokens, self.limit - len(prompt))

    def request(self, task: str, prompts: Sequence[Sequence[int]], first: int = 0) -> Request:
        """Ask for answers by a task; `first` is the number of the first prompt."""
        options = self.options
        is_sampled = task not in ("greedy", "beam_search") and options.temperature > 0
        kept = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
        beams = Beams(options.num_beams, options.length_penalty, options.early_stopping)
        return Request(
            prompts=tuple(map(tuple, prompts)),
            rooms=tuple(map(self.room, prompts)),
            stops=self.text.stops,
            rule=Rule(True, seed=options.seed, **kept) if is_sampled else Rule(),
            beams=beams if task.startswith("beam_search") else None,
            first=first,
        )

    def answers(self, task: str, prompts: Sequence[str]) -> Iterator[Answer]:
        """Answer prompts in batches; all are checked before the first is answered."""
        encoded = [self.text.encode(prompt) for prompt in prompts]
        for ids in encoded:
            self.room(ids)
        size = self.options.batch_size
        for first in range(0, len(prompts), size):
            request = self.request(task, encoded[first : first + size], first)
            said: list[list[int]] = [[] for _ in request.prompts]
            for step in self.engine.answer(request):
                for row, token in step:
                    said[row].append(token)
            for prompt, tokens in zip(prompts[first:], said):
                end: Literal["stop", "length"] = "stop"
                if tokens[-1] not in request.stops:
                    end = "length"
                yield Answer(task, prompt, self.text.decode(tokens), tuple(tokens), end)


def run_session(
    options: GenerateOptions, lead: Callable[[Session], None], *, talks: bool = False
) -> None:
    """Load the model and call `lead` on the first rank; the others do their part of its work."""
    is_leader = environment.is_rank_zero()
    # Before the weights: what is wrong with the tokenizer or the template is told at once.
    folder = detect(options.load).config_folder
    text = Text(options, folder, talks=talks) if is_leader else None
    training = as_training(options)
    if talks:
        training = training.model_copy(update={"distributed_timeout_minutes": TALKING_MINUTES})
    model = load_model(training)
    engine = Engine(model, cached=options.use_kv_cache)
    if text is None:
        return engine.follow()
    try:
        limit = _limit(options, model.longest)
        lead(Session(options, engine, text, limit, model.shape.vocab_size))
    finally:
        engine.close()


def _limit(options: GenerateOptions, longest: int) -> int:
    if options.max_length is not None and options.max_length > longest:
        raise ConfigError(
            f"--max-length {options.max_length}: the model reads at most {longest} tokens "
            "(--max-position-embeddings changes that)"
        )
    return options.max_length or longest
