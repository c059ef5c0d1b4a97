"""A loaded model as lm-evaluation-harness asks for it: scored continuations, and completions.

Import this on the rank that leads; the others serve its requests.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from mindspeed.config import ConfigError
from mindspeed_llm.generation.engine import Engine, Request
from mindspeed_llm.generation.sampling import SamplingParams
from mindspeed_llm.generation.scoring import Score, ScoreRequest, rows_by_input

logger = logging.getLogger(__name__)

MAX_NEW_TOKENS = 256
"""Of a completion whose task names no limit, as with the harness's own models."""

T = TypeVar("T")


@dataclass(frozen=True)
class ModelFacts:
    """What requests depend on beside the tokenizer."""

    max_length: int
    """The most tokens of a question with its answer."""
    batch_size: int
    vocab_size: int
    stop_ids: frozenset[int]
    """Tokens that end a completion."""


class MegatronLM(TemplateLM):
    """Answers the requests of the harness by an engine."""

    def __init__(self, engine: Engine, tokenizer: Any, facts: ModelFacts, seed: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._engine, self._facts, self._seed = engine, facts, seed

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text that has no context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """The folder of the tokenizer."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text; one that begins with the prefix token gets no second one."""
        if add_special_tokens is None and string.startswith(
            self.tokenizer.decode(self.prefix_token_id)
        ):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(string, **options)
        if ids and max(ids) >= self._facts.vocab_size:
            raise ConfigError(
                f"the tokenizer has token {max(ids)}, the model has {self._facts.vocab_size}: "
                "--tokenizer-name-or-path is that of another model"
            )
        return ids

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        # The harness strips a context of spaces to nothing.
        prefix = [self.prefix_token_id]
        pairs = [(context or prefix, answer) for _, context, answer in requests]
        asked = [index for index, (_, answer) in enumerate(pairs) if answer]
        longest = self._facts.max_length + 1  # the last token is no input
        if cut := sum(len(context) + len(answer) > longest for context, answer in pairs):
            logger.warning(
                "%d of %d questions with their answers are longer than %d tokens: cut on the left",
                *(cut, len(pairs), longest - 1),
            )

        rows = rows_by_input((index, [*chain(*pairs[index])][-longest:]) for index in asked)
        inputs = list(rows)

        def score(batch: Sequence[int]) -> list[list[Score]]:
            chosen = tuple(inputs[number] for number in batch)
            scored = tuple(
                tuple(tuple(pairs[index][1][-len(row) :]) for index in rows[row]) for row in chosen
            )
            scores = iter(self._engine.score(ScoreRequest(chosen, scored)))
            return [list(islice(scores, len(each))) for each in scored]

        found = [Score(0.0, True)] * len(pairs)  # of an answer without a token
        by_row = self._in_batches(list(map(len, inputs)), score, "Scoring answers", disable_tqdm)
        for row, scores in zip(inputs, by_row, strict=True):
            for index, one in zip(rows[row], scores, strict=True):
                found[index] = one
        for (texts, _, _), one in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, tuple(one))
        return [(one.log_prob, one.is_greedy) for one in found]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of whole texts, in windows where they are too long."""
        windows, owners = [], []
        for number, (text,) in enumerate(request.args for request in requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._facts.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for number, (log_prob, _) in zip(owners, scores, strict=True):
            totals[number] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Complete texts up to one of their stop sequences."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            group = [requests[number] for number in numbers]
            found = self._complete([one.args[0] for one in group], group[0].args[1], disable_tqdm)
            for number, text in zip(numbers, found, strict=True):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return texts

    def _complete(
        self, contexts: list[str], options: dict[str, Any], disable_tqdm: bool
    ) -> list[str]:
        chosen = normalize_gen_kwargs(options, MAX_NEW_TOKENS)
        until = handle_stop_sequences(
            chosen["until"] if "until" in chosen else None,
            eos=self.tokenizer.decode(self.eot_token_id),
        )
        count, most = int(chosen["max_gen_toks"]), self._facts.max_length
        if count >= most:
            raise ConfigError(
                f"a task asks for {count} new tokens (max_gen_toks; {MAX_NEW_TOKENS} if it names "
                f"none), which leaves none of {most} for the question: raise --max-length"
            )
        params = SamplingParams()
        if chosen.get("do_sample"):
            params = SamplingParams(
                sample=True,
                temperature=float(chosen.get("temperature", 1.0)),
                top_k=int(chosen.get("top_k", 50)),  # as in transformers
                top_p=float(chosen.get("top_p", 1.0)),
                seed=self._seed,
            )
        # A text without a token is completed from the prefix; a long one is cut on the left.
        whole = [self.tok_encode(each) or [self.prefix_token_id] for each in contexts]
        prompts = [each[count - most :] for each in whole]
        if cut := sum(map(len, whole)) - sum(map(len, prompts)):
            logger.warning("%d tokens on the left of questions are cut: they are too long", cut)

        def complete(batch: Sequence[int]) -> list[str]:
            request = Request(
                prompts=tuple(tuple(prompts[index]) for index in batch),
                max_new_tokens=(count,) * len(batch),
                stop_ids=self._facts.stop_ids,
                params=params,
                first=tuple(batch),
            )
            return self._texts(request, until)

        return self._in_batches(list(map(len, prompts)), complete, "Completing", disable_tqdm)

    def _texts(self, request: Request, until: Sequence[str]) -> list[str]:
        """Generate until every row has ended or has one of the stop sequences."""
        tokens: list[list[int]] = [[] for _ in request.prompts]
        running = set(range(len(tokens)))
        tail = 4 * max(map(len, until), default=0)  # a character has at most four tokens
        for step in self._engine.generate(request, lambda: not running):
            for row, token in step:
                if row not in running:
                    continue
                tokens[row].append(token)
                if any(stop in self.tokenizer.decode(tokens[row][-tail:]) for stop in until):
                    running.discard(row)
        texts = [self.tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
        return [_cut(text, until) for text in texts]

    def _in_batches(
        self,
        lengths: list[int],
        work: Callable[[Sequence[int]], list[T]],
        summary: str,
        disable_tqdm: bool,
    ) -> list[T]:
        """Do work on rows of similar lengths at a time, the longest first; keep their order."""
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        found: dict[int, T] = {}
        with tqdm(total=len(lengths), desc=summary, disable=disable_tqdm) as bar:
            for batch in _chunks(order, self._facts.batch_size * self._engine.num_copies):
                found |= zip(batch, work(batch), strict=True)
                bar.update(len(batch))
        return [found[index] for index in range(len(lengths))]


def _chunks(items: list[int], size: int) -> Iterator[list[int]]:
    return (items[first : first + size] for first in range(0, len(items), size))


def _cut(text: str, until: Sequence[str]) -> str:
    """Return what stands in front of the first stop sequence."""
    for stop in until:
        if stop:
            text = text.split(stop)[0]
    return text
