"""Conversations written by the tokenizer's own chat template, without loading transformers."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

from mindspeed.config import ConfigError, parse_json
from mindspeed_llm.data.chat import Piece, Thinking
from mindspeed_llm.data.conversation import Conversation, MalformedRecord, Message, UnusableRecord
from mindspeed_llm.data.template import Part, special_matcher, split_special
from mindspeed_llm.data.tokenizer import TokenizerFacts
from mindspeed_llm.data.tools import read_calls, read_tools

# Stand for special tokens spelled in the data while the template runs: private-use characters,
# which no tokenizer has as special tokens.
OPEN, CLOSE = "\U0010fff0", "\U0010fff1"
HIDDEN = re.compile(f"{OPEN}([0-9]+){CLOSE}")


class JinjaFormat:
    """Writes conversations as `apply_chat_template` does."""

    def __init__(
        self, facts: TokenizerFacts, parse_special: bool = False, thinking: Thinking = "none"
    ) -> None:
        if not facts.chat_template:
            raise ConfigError(
                f"--prompt-type tokenizer: the tokenizer in {facts.source} has no chat template; "
                "name one of configs/finetune/templates.json"
            )
        self._facts, self._parse = facts, parse_special
        self._special = special_matcher(facts)
        self._tokens = list(facts.special)
        self._extra = {} if thinking == "none" else {"enable_thinking": thinking == "true"}
        self._template = _compile(facts)
        self.eos_id = facts.eos_id
        self.stop_ids: tuple[int, ...] = () if self.eos_id is None else (self.eos_id,)
        self.teaches_eos = self._ends_with_eos()

    def __getstate__(self) -> dict[str, Any]:
        # A compiled template cannot go to another process: it is compiled again there.
        return {name: value for name, value in vars(self).items() if name != "_template"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._template = _compile(self._facts)

    def render(self, conversation: Conversation) -> list[Piece]:
        """Write prompts and answers in turn; a last prompt without answer is written too."""
        messages = self._messages(conversation)
        tools = read_tools(conversation.tools) or None
        whole = self._run(messages, tools, generate=messages[-1]["role"] != "assistant")
        borders: list[tuple[int, int]] = []
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                borders.append(self._answer_span(whole, messages, place, tools))
        return self._pieces(whole, [span for span in borders if span[0] < span[1]])

    def _answer_span(
        self, whole: str, messages: list[dict[str, Any]], place: int, tools: Any
    ) -> tuple[int, int]:
        """Find an answer in the text: from the prompt for it to its end.

        Some templates write earlier answers otherwise than the last one (without thoughts): then
        what stands there was never an answer to that prompt, and it is not learnt.
        """
        prompt = self._run(messages[:place], tools, generate=True)
        until = self._run(messages[: place + 1], tools, generate=False)
        eos = self._facts.eos or ""
        if not whole.startswith(until):
            until = until.removesuffix(eos)  # some put it behind the last answer only
        is_last = place == len(messages) - 1
        if is_last and not whole.startswith(prompt):
            # The prompt for a new answer may open thoughts that a given answer does not have.
            prompt = _common(whole, prompt)
        if not (whole.startswith(prompt) and whole.startswith(until)):
            if is_last:
                raise UnusableRecord("the chat template does not end with the answer")
            return 0, 0
        text = until[len(prompt) :]
        cut = text.rfind(eos) + len(eos) if eos and eos in text else len(text.rstrip())
        return len(prompt), len(prompt) + (cut if not text[cut:].strip() else len(text))

    def _pieces(self, whole: str, spans: list[tuple[int, int]]) -> list[Piece]:
        pieces, done = [], 0
        for start, end in spans:
            pieces.append(Piece(self._parts(whole[done:start]), False))
            pieces.append(Piece(self._parts(whole[start:end]), True))
            done = end
        if whole[done:] or not pieces:
            pieces.append(Piece(self._parts(whole[done:]), False))
        return pieces

    def _parts(self, text: str) -> list[Part]:
        parts = split_special(text, self._special, self._facts)
        return [self._show(part) if isinstance(part, str) else part for part in parts]

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if conversation.system:
            found.append({"role": "system", "content": self._hide(conversation.system)})
        for message in conversation.messages:
            found.append(self._message(message))
        return found

    def _message(self, message: Message) -> dict[str, Any]:
        role = "tool" if message.role == "observation" else message.role
        shown: dict[str, Any] = {"role": role, "content": self._hide(message.content)}
        if message.calls:
            calls = [
                {"name": call.name, "arguments": _object(call.arguments)}
                for call in read_calls(self._hide(message.calls))
            ]
            shown["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        return shown

    def _hide(self, text: str) -> str:
        if self._parse or self._special is None:
            return text
        return self._special.sub(lambda m: f"{OPEN}{self._tokens.index(m[0])}{CLOSE}", text)

    def _show(self, text: str) -> str:
        if OPEN not in text:
            return text
        names = {str(number): token for number, token in enumerate(self._tokens)}
        return HIDDEN.sub(lambda match: names.get(match[1], match[0]), text)

    def _run(self, messages: list[dict[str, Any]], tools: Any, generate: bool) -> str:
        from jinja2.sandbox import SecurityError

        names = {"bos_token": self._facts.bos or "", "eos_token": self._facts.eos or ""}
        names["pad_token"] = self._facts.pad or ""
        self._template.environment.begin()
        try:
            return str(
                self._template.render(
                    messages=messages,
                    tools=tools,
                    add_generation_prompt=generate,
                    **names,
                    **self._extra,
                )
            )
        except (SecurityError, RecursionError) as error:  # whatever the record, so the run ends
            raise ConfigError(
                f"the chat template of {self._facts.source} is refused: {error}"
            ) from None
        except Exception as error:  # a template is a program of others: it may raise anything
            raise MalformedRecord(f"the tokenizer's chat template refuses it: {error}") from None

    def _ends_with_eos(self) -> bool:
        probe = Conversation((Message("user", "a"), Message("assistant", "b")))
        try:
            pieces = self.render(probe)
        except (MalformedRecord, UnusableRecord):
            return False
        answers = [piece.parts for piece in pieces if piece.is_answer and piece.parts]
        return bool(answers) and answers[-1][-1] in self.stop_ids


def _object(arguments: str) -> Any:
    try:
        return parse_json(arguments)
    except ValueError:
        return arguments


def _common(first: str, second: str) -> str:
    size = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), len(second))
    return second[:size]


def _compile(facts: TokenizerFacts) -> Any:
    """Compile a chat template as transformers does: sandboxed, with its few helpers."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols

    from mindspeed_llm.data.template_sandbox import BoundedEnvironment

    class Generation(Extension):
        """The {% generation %} block that marks an answer writes just what is in it."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = environment.guarded("tojson", to_json)
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(facts.chat_template or "")
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
        raise ConfigError(f"the chat template of {facts.source} is not valid: {error}") from None
