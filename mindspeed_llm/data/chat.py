"""Conversations to stretches of prompt and answer, by a template or the tokenizer's own format."""

from __future__ import annotations

from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple, Protocol

from mindspeed.config import ConfigError
from mindspeed_llm.data.conversation import Conversation, Message
from mindspeed_llm.data.template import Form, Part, Template, put_before_content
from mindspeed_llm.data.tools import read_calls, tool_lines

Thinking = Literal["true", "false", "none"]
FORMS = 100
"""How many forms of prompts are remembered: those of as many system prompts."""


class Piece(NamedTuple):
    """A stretch of a sample that is trained as a whole or not at all."""

    parts: list[Part]
    is_answer: bool
    first_label: int | None = None
    """What is to be trained in the place of the first token, if not what stands there."""


class ChatFormat(Protocol):
    """A way to write conversations."""

    title: str
    """What it is called in messages to the user."""
    eos_id: int | None
    stop_ids: tuple[int, ...]
    teaches_eos: bool

    def render(self, conversation: Conversation) -> list[Piece]:
        """Write prompts and answers in turn; a last prompt without answer is written too."""


class TemplateFormat:
    """Writes conversations by a template."""

    def __init__(self, template: Template, thinking: Thinking = "none") -> None:
        self._template = template
        self._entry = template.entry
        self._reasons = template.entry.template_class == "ReasoningTemplate"
        self._thinking = thinking
        # Few prompts differ in more than the question: what is the same is put together once.
        self._prompt = lru_cache(FORMS)(self._make_prompt)
        self._answer = Form(template.assistant)
        self.title = f"the template {template.entry.name}"
        self.eos_id = template.eos_id
        self.stop_ids = template.stop_ids
        self.teaches_eos = template.teaches_eos
        if thinking == "true" and not self._reasons:
            raise ConfigError(
                f"--enable-thinking true: the template {self._entry.name} has no thoughts; "
                "use one of class ReasoningTemplate, such as qwen3"
            )

    def render(self, conversation: Conversation) -> list[Piece]:
        """Write prompts and answers in turn; a last prompt without answer is written too."""
        pieces: list[Piece] = []
        messages, system, tools = conversation
        late_eos = self._entry.efficient_eos and self.eos_id is not None
        for turn, (asked, answer) in enumerate(zip_longest(messages[::2], messages[1::2])):
            goes_on = messages[2 * turn + 2 : 2 * turn + 3]
            is_step = bool(goes_on) and goes_on[0].role == "observation"
            thoughts, text = self._think(answer, is_step)
            opening = None if turn else (system, tools)
            if asked.before:
                form = self._make_prompt(opening, True, thoughts, asked.before)
            else:
                form = self._prompt(opening, asked.role == "observation", thoughts)
            values = {"content": asked.content, "idx": str(turn)}
            first_label = self.eos_id if late_eos and turn else None
            pieces.append(Piece(form.fill(values), False, first_label))
            if answer is not None:
                pieces.append(Piece(self._write_answer(answer, text), True))
        if late_eos and pieces[-1].is_answer:
            pieces.append(Piece([self.eos_id], True))  # type: ignore[list-item]
        return pieces

    def _make_prompt(
        self,
        opening: tuple[str, str] | None,
        is_tool: bool,
        thoughts: str,
        before: tuple[Message, ...] = (),
    ) -> Form:
        """Prepare a prompt; the first of a conversation opens with its system text and tools."""
        template = self._template
        stretch = template.observation if is_tool else template.user
        between = Form(template.between_observations).fill({}) if before else []
        for message in reversed(before):
            stretch = put_before_content(stretch, [message.content, *between])
        if opening is None:
            return Form([*Form(template.separator).fill({}), *stretch, thoughts])
        system = self._system(*opening)
        if self._entry.template_class == "Llama2Template":
            stretch, system = put_before_content(stretch, system), []
        return Form([*Form(template.prefix).fill({}), *system, *stretch, thoughts])

    def _system(self, given: str, given_tools: str) -> list[Part]:
        default = self._entry.default_system
        text = given or (default if isinstance(default, str) else "\n".join(default))
        tools = tool_lines(given_tools)
        if not (text or tools or self._entry.force_system):
            return []
        template = self._template
        described = Form(template.tools).fill({"content": tools}) if tools else []
        if not text and described and isinstance(described[0], str):
            described[0] = described[0].lstrip("\n")  # it separates tools from the system text
        return Form(put_before_content(template.system, [text, *described])).fill({})

    def _think(self, answer: Message | None, is_step: bool = False) -> tuple[str, str]:
        """Return what of the thoughts goes to the prompt, and the text of the answer.

        A step is an answer that calls tools and goes on with their results.
        """
        text = answer.content if answer else ""
        if not self._reasons:
            return "", text
        opening, closing = self._entry.thought_words
        start, end = text.find(opening.strip()), text.find(closing.strip())
        has_thoughts = 0 <= start < end
        if has_thoughts and self._thinking == "false":
            text = text[:start] + text[end + len(closing.strip()) :].lstrip("\n")
            has_thoughts = False
        if has_thoughts and not text[:start].strip():
            thoughts = text[start + len(opening.strip()) : end].strip("\n")
            behind = text[end + len(closing.strip()) :].lstrip("\n")
            return "", f"{opening}{thoughts}{closing}{behind}"
        if has_thoughts or (answer is None and self._thinking != "false"):
            return "", text
        if is_step and self._thinking == "none":
            return "", text  # as the models' own templates do
        empty = opening + closing
        return ("", empty + text) if self._thinking == "true" else (empty, text)

    def _write_answer(self, answer: Message, text: str) -> list[Part]:
        if not answer.calls:
            return self._answer.fill({"content": text})
        said: list[Part] = [text]
        has_text = bool(text) and not (
            self._reasons and text.endswith(self._entry.thought_words[1])
        )
        for number, call in enumerate(read_calls(answer.calls)):
            said += ["\n"] if number or has_text else []
            said += Form(self._template.function).fill(call._asdict())
        return Form(put_before_content(self._template.assistant, said)).fill({})
