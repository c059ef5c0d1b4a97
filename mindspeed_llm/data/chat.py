"""Conversations to stretches of prompt and answer, by a template or the tokenizer's own format."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from mindspeed.config import ConfigError
from mindspeed_llm.data.conversation import Conversation, Message
from mindspeed_llm.data.template import Field, Part, Stretch, Template, fill, join
from mindspeed_llm.data.tools import read_calls, tool_lines

Thinking = Literal["true", "false", "none"]


class Piece(NamedTuple):
    """A stretch of a sample that is learnt as a whole or not at all."""

    parts: list[Part]
    is_answer: bool
    first_label: int | None = None
    """What is to be learnt in the place of the first token, if not what stands there."""


class ChatFormat(Protocol):
    """A way to write conversations."""

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
        messages = conversation.messages
        late_eos = self._entry.efficient_eos and self.eos_id is not None
        for turn, place in enumerate(range(0, len(messages), 2)):
            answer = messages[place + 1] if place + 1 < len(messages) else None
            thoughts, text = self._think(answer)
            prompt = [*self._prompt(conversation, messages[place], turn), thoughts]
            first_label = self.eos_id if late_eos and turn else None
            pieces.append(Piece(join(prompt), False, first_label))
            if answer is not None:
                pieces.append(Piece(self._answer(answer, text), True))
        if late_eos and pieces[-1].is_answer:
            pieces.append(Piece([self.eos_id], True))  # type: ignore[list-item]
        return pieces

    def _prompt(self, conversation: Conversation, message: Message, turn: int) -> list[Part]:
        template = self._template
        system = [] if turn else self._system(conversation)
        inside = self._entry.template_class == "Llama2Template"
        stretch = template.observation if message.role == "observation" else template.user
        return [
            *fill(template.separator if turn else template.prefix, {}),
            *([] if inside else system),
            *_fill_after(stretch, system if inside else [], message.content, str(turn)),
        ]

    def _system(self, conversation: Conversation) -> list[Part]:
        default = self._entry.default_system
        text = conversation.system or (default if isinstance(default, str) else "\n".join(default))
        tools = tool_lines(conversation.tools)
        if not (text or tools or self._entry.force_system):
            return []
        template = self._template
        described = fill(template.tools, {"content": tools}) if tools else []
        return _fill_after(template.system, [text, *described], "")

    def _think(self, answer: Message | None) -> tuple[str, str]:
        """Return what of the thoughts goes to the prompt, and the text of the answer."""
        opening, closing = self._entry.thought_words
        text = answer.content if answer else ""
        if not self._reasons:
            return "", text
        start, end = text.find(opening.strip()), text.find(closing.strip())
        has_thoughts = 0 <= start < end
        if has_thoughts and self._thinking == "false":
            text = text[:start] + text[end + len(closing.strip()) :].lstrip("\n")
            has_thoughts = False
        if has_thoughts or (answer is None and self._thinking != "false"):
            return "", text
        empty = opening + closing
        return ("", empty + text) if self._thinking == "true" else (empty, text)

    def _answer(self, answer: Message, text: str) -> list[Part]:
        said: list[Part] = [text]
        for call in read_calls(answer.calls):
            said += ["\n"] if join(said) else []
            said += fill(self._template.function, call._asdict())
        return _fill_after(self._template.assistant, said, "")


def _fill_after(stretch: Stretch, front: list[Part], content: str, turn: str = "") -> list[Part]:
    """Fill a stretch, with more parts in front of its content."""
    filled: list[Part] = []
    for part in stretch:
        if isinstance(part, Field):
            filled += [*front, content] if part.name == "content" else [turn]
        else:
            filled.append(part)
    return join(filled)
