"""Render conversations with the tokenizer's own chat template, without loading transformers."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

from mindspeed.config import ConfigError
from mindspeed_llm.data.chat import ChatFormat, Part, Segment, Thinking
from mindspeed_llm.data.conversation import (
    Conversation,
    MalformedRecord,
    Message,
    UnusableRecord,
    parse_arguments,
    read_calls,
    read_tools,
)
from mindspeed_llm.data.template import Template, TemplateEntry, TemplateFormat
from mindspeed_llm.data.tokenizer import TokenizerFacts, special_matcher, split_special

# Stand for special tokens spelled in the data while the template runs: private-use characters,
# which no tokenizer has as special tokens.
OPEN, CLOSE = "\U0010fff0", "\U0010fff1"
ESCAPED = re.compile(f"{OPEN}([0-9]+){CLOSE}")


class JinjaFormat:
    """Renders conversations as `apply_chat_template` does."""

    def __init__(
        self, facts: TokenizerFacts, parse_special: bool = False, thinking: Thinking = "none"
    ) -> None:
        if not facts.chat_template:
            raise ConfigError(
                f"--prompt-type tokenizer: the tokenizer in {facts.source} has no chat template; "
                "name one of configs/finetune/templates.json"
            )
        self._facts, self._parse_special = facts, parse_special
        self._special = special_matcher(facts)
        self._tokens = list(facts.special)
        is_default = thinking == "none"
        self._template_options = {} if is_default else {"enable_thinking": thinking == "true"}
        self._compile()
        self.title = "the tokenizer's chat template"
        self.eos_id = facts.eos_id
        self.stop_ids: tuple[int, ...] = () if self.eos_id is None else (self.eos_id,)
        self.trains_eos = self._ends_with_eos()

    def __getstate__(self) -> dict[str, Any]:
        # A compiled template cannot be pickled: the other process compiles it again.
        compiled = ("_template", "_tool_template")
        return {name: value for name, value in vars(self).items() if name not in compiled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._compile()

    def _compile(self) -> None:
        source, tool_template = self._facts.source, self._facts.tool_template
        self._template = _compile(self._facts.chat_template or "", source)
        self._tool_template = _compile(tool_template, source) if tool_template else self._template

    def render(self, conversation: Conversation) -> list[Segment]:
        """Return prompts and completions in turn; the last prompt may have no completion."""
        messages = self._messages(conversation)
        tools = read_tools(self._escape_special(conversation.tools)) or None
        whole = self._render_text(messages, tools, generate=messages[-1]["role"] != "assistant")
        spans: list[tuple[int, int]] = []
        answers = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
        for index, answer in zip(answers, conversation.messages[1::2]):
            if answer.is_trained:
                spans.append(self._completion_span(whole, messages, index, tools))
        return self._segments(whole, [span for span in spans if span[0] < span[1]])

    def _completion_span(
        self, whole: str, messages: list[dict[str, Any]], index: int, tools: Any
    ) -> tuple[int, int]:
        """Find a completion in the text: from the end of its prompt to its own end.

        Some templates render earlier completions differently from the last one (without thoughts):
        such text never was a completion of that prompt, and it is not trained.
        """
        prompt = self._render_text(messages[:index], tools, generate=True)
        until = self._render_text(messages[: index + 1], tools, generate=False)
        eos = self._facts.eos or ""
        if not whole.startswith(until):
            until = until.removesuffix(eos)  # some append it to the last completion only
        is_last = index == len(messages) - 1
        if is_last and not whole.startswith(prompt):
            # The generation prompt may open thoughts that the given completion does not have.
            # The texts diverge after a line or a special token, not inside a word.
            without_prompt = self._render_text(messages[:index], tools, generate=False)
            common = _common_prefix(whole, prompt)
            least = len(_common_prefix(whole, without_prompt))
            prompt = common[: max(self._last_boundary(common), least)]
        if not (whole.startswith(prompt) and whole.startswith(until)):
            if is_last:
                raise UnusableRecord("the chat template does not end with the answer")
            if "tool_calls" not in messages[index]:
                return 0, 0
            return self._call_span(whole, messages, index, tools)
        text = until[len(prompt) :]
        cut = text.rfind(eos) + len(eos) if eos and eos in text else len(text.rstrip())
        return len(prompt), len(prompt) + (cut if not text[cut:].strip() else len(text))

    def _call_span(
        self, whole: str, messages: list[dict[str, Any]], index: int, tools: Any
    ) -> tuple[int, int]:
        """Find a tool call that reads differently before its result (Qwen3: without thoughts).

        It lies between the contents of its neighbours, which are located by changing them, after
        what opens a completion, or as much of it as is present, and ends with the EOS token.
        """
        before = _with_marker(messages[index - 1], at_end=True)
        after = _with_marker(messages[index + 1], at_end=False)
        changed = (
            [*messages[: index - 1], before, *messages[index:]],
            [*messages[: index + 1], after, *messages[index + 2 :]],
        )
        texts = [self._render_text(one, tools, generate=False) for one in changed]
        first, last = (len(_common_prefix(whole, text)) for text in texts)
        without_prompt = self._render_text(messages[:index], tools, generate=False)
        with_prompt = self._render_text(messages[:index], tools, generate=True)
        opening = with_prompt.removeprefix(without_prompt)
        while opening and whole.find(opening, first, last) < 0:
            opening = opening[: self._last_boundary(opening[:-1])]
        start = whole.find(opening, first, last) + len(opening)
        eos = self._facts.eos or ""
        end = whole.find(eos, start, last) if eos and opening else -1
        if end < 0:
            raise MalformedRecord(
                f"calls tools, but where {self.title} ends a call cannot be found, so it would "
                "not be trained: choose another chat template, such as qwen"
            )
        return start, end + len(eos)

    def _last_boundary(self, text: str) -> int:
        """Return where the last line or special token of a text ends, 0 without one."""
        ends = [match.end() for match in self._special.finditer(text)] if self._special else []
        return max([0, text.rfind("\n") + 1, *ends])

    def _segments(self, whole: str, spans: list[tuple[int, int]]) -> list[Segment]:
        segments, done = [], 0
        for start, end in spans:
            segments.append(Segment(self._parts(whole[done:start]), False))
            segments.append(Segment(self._parts(whole[start:end]), True))
            done = end
        if whole[done:] or not segments:
            segments.append(Segment(self._parts(whole[done:]), False))
        return segments

    def _parts(self, text: str) -> list[Part]:
        parts = split_special(text, self._special, self._facts)
        return [self._unescape_special(part) if isinstance(part, str) else part for part in parts]

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if conversation.system:
            found.append({"role": "system", "content": self._escape_special(conversation.system)})
        for message in conversation.messages:
            found.extend(self._message(one) for one in (*message.before, message))
        return found

    def _message(self, message: Message) -> dict[str, Any]:
        role = "tool" if message.role == "observation" else message.role
        shown: dict[str, Any] = {"role": role, "content": self._escape_special(message.content)}
        if message.call_id:
            shown["tool_call_id"] = message.call_id
        if message.calls:
            shown["tool_calls"] = [
                {
                    "type": "function",
                    **({"id": call.id} if call.id else {}),
                    "function": {"name": call.name, "arguments": parse_arguments(call.arguments)},
                }
                for call in read_calls(self._escape_special(message.calls))
            ]
        return shown

    def _escape_special(self, text: str) -> str:
        if self._parse_special or self._special is None:
            return text
        return self._special.sub(lambda m: f"{OPEN}{self._tokens.index(m[0])}{CLOSE}", text)

    def _unescape_special(self, text: str) -> str:
        if OPEN not in text:
            return text
        names = {str(number): token for number, token in enumerate(self._tokens)}
        return ESCAPED.sub(lambda match: names.get(match[1], match[0]), text)

    def _render_text(self, messages: list[dict[str, Any]], tools: Any, generate: bool) -> str:
        from jinja2.sandbox import SecurityError

        names = {"bos_token": self._facts.bos or "", "eos_token": self._facts.eos or ""}
        names["pad_token"] = self._facts.pad or ""
        template = self._tool_template if tools else self._template
        try:
            return str(
                template.render(
                    messages=messages,
                    tools=tools,
                    add_generation_prompt=generate,
                    **names,
                    **self._template_options,
                )
            )
        except (
            SecurityError,
            RecursionError,
        ) as error:  # no record's fault: end the run
            raise ConfigError(
                f"the chat template of {self._facts.source} is refused: {error}"
            ) from None
        except Exception as error:  # a template is a third-party program: it may raise anything
            raise MalformedRecord(f"the tokenizer's chat template refuses it: {error}") from None

    def _ends_with_eos(self) -> bool:
        probe = Conversation((Message("user", "a"), Message("assistant", "b")))
        try:
            segments = self.render(probe)
        except (MalformedRecord, UnusableRecord):
            return False
        answers = [segment.parts for segment in segments if segment.is_completion and segment.parts]
        return bool(answers) and answers[-1][-1] in self.stop_ids


def make_chat_format(
    facts: TokenizerFacts,
    template: TemplateEntry | None,
    *,
    parse_special: bool = False,
    thinking: Thinking = "none",
) -> ChatFormat:
    """Build the format of a template, or without one that of the tokenizer's own chat template."""
    if template is None:
        return JinjaFormat(facts, parse_special, thinking)
    return TemplateFormat(Template(template, facts), thinking)


def _with_marker(message: dict[str, Any], *, at_end: bool) -> dict[str, Any]:
    """Return a message with a marker at the beginning of its content, or at its end."""
    content = message["content"]
    mark = [{"type": "text", "text": CLOSE}] if isinstance(content, list) else CLOSE
    return {**message, "content": content + mark if at_end else mark + content}


def _common_prefix(first: str, second: str) -> str:
    size = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), len(second))
    return second[:size]


def _compile(template: str, source: str) -> Any:
    """Compile a chat template as transformers does: sandboxed, with its few helpers."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols

    from mindspeed_llm.data.template_sandbox import BoundedEnvironment

    class Generation(Extension):
        """Renders the content of a {% generation %} block, which marks a completion."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = environment.guarded("tojson", to_json)
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
        raise ConfigError(f"the chat template of {source} is not valid: {error}") from None
