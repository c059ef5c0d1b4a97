"""Chat formats, which render conversations, and the check that a format drops nothing."""

from __future__ import annotations

from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple, Protocol

from mindspeed_llm.data.conversation import (
    Conversation,
    MalformedRecord,
    Message,
    UnusableRecord,
    dump,
    read_calls,
    read_tools,
)
from mindspeed_llm.data.tokenizer import TokenizerFacts, special_matcher, split_special

Part = str | int
"""An element of a rendered segment: text, or the id of a special token."""
Thinking = Literal["true", "false", "none"]


class Segment(NamedTuple):
    """A span of a sample that is trained as a whole (a completion) or not at all (a prompt)."""

    parts: list[Part]
    is_completion: bool
    first_label: int | None = None
    """The label of the first token, if it is not that token itself."""


class ChatFormat(Protocol):
    """Renders conversations as prompts and completions."""

    title: str
    """Its name in messages to the user."""
    eos_id: int | None
    stop_ids: tuple[int, ...]
    trains_eos: bool
    """Whether a completion always ends with a stop token."""

    def render(self, conversation: Conversation) -> list[Segment]:
        """Return prompts and completions in turn; the last prompt may have no completion."""


PROBE = "mindspeedprobe"


class CheckedFormat:
    """Renders conversations with another format, and refuses those that it would render in part.

    A chat template may silently ignore tools, their calls and results, and the system prompt.
    Whether it does is determined once for each, by rendering a probe.
    """

    def __init__(
        self,
        chat: ChatFormat,
        facts: TokenizerFacts,
        *,
        parse_special: bool = False,
        option: str = "--prompt-type",
    ) -> None:
        self._chat, self._facts, self._option = chat, facts, option
        self._special = special_matcher(facts) if parse_special else None
        self.title = chat.title
        self.eos_id = chat.eos_id
        self.stop_ids = chat.stop_ids
        self.trains_eos = chat.trains_eos

    def render(self, conversation: Conversation) -> list[Segment]:
        """Return prompts and completions in turn; the last prompt may have no completion."""
        self._check_parts(conversation)
        segments = self._chat.render(conversation)
        if not all(self._has_content(segment) for segment in segments if segment.is_completion):
            self._check_completions(segments)
        return segments

    def _check_completions(self, segments: list[Segment]) -> None:
        """Refuse an empty completion; its stop token may be a segment of its own."""
        groups = groupby(segments, lambda segment: segment.is_completion)
        answers = [list(group) for is_completion, group in groups if is_completion]
        for number, answer in enumerate(answers, 1):
            if not any(map(self._has_content, answer)):
                raise MalformedRecord(
                    f"answer {number} of {len(answers)}, rendered by {self.title}, is nothing but "
                    "an end token: a model would be trained to answer nothing"
                )

    def _has_content(self, segment: Segment) -> bool:
        return any(map(self._is_content, segment.parts))

    def _check_parts(self, conversation: Conversation) -> None:
        messages = conversation.messages
        if conversation.system.strip() and not self._renders_system:
            raise MalformedRecord(f"has a system text, which {self.title} does not render")
        if conversation.tools and not self._renders_tools and read_tools(conversation.tools):
            raise self._dropped(f"describes tools ({_names(conversation)})")
        if any(message.calls for message in messages) and not self._renders_calls:
            called = [call.name for message in messages for call in read_calls(message.calls)]
            raise self._dropped(f"calls tools ({', '.join(dict.fromkeys(called))})")
        if not self._renders_results and any(m.role == "observation" for m in messages):
            raise self._dropped("has results of tools")

    def _dropped(self, what: str) -> MalformedRecord:
        return MalformedRecord(
            f"{what}, which {self.title} does not render: choose a {self._option} that renders "
            "them, such as qwen"
        )

    def _is_content(self, part: Part) -> bool:
        """Return whether a part is more than white space and stop tokens."""
        if isinstance(part, int):
            return part not in self.stop_ids
        if self._special is None:
            return bool(part.strip())
        parts = split_special(part, self._special, self._facts)
        return any(
            one.strip() if isinstance(one, str) else one not in self.stop_ids for one in parts
        )

    @cached_property
    def _renders_system(self) -> bool:
        return self._renders(Conversation((_USER, _ANSWER), system=PROBE))

    @cached_property
    def _renders_tools(self) -> bool:
        function = {"name": PROBE, "description": "d", "parameters": {"type": "object"}}
        return self._renders(Conversation((_USER, _ANSWER), tools=dump([function])))

    @cached_property
    def _renders_calls(self) -> bool:
        return self._renders(Conversation((_USER, _call(PROBE), _RESULT, _ANSWER)))

    @cached_property
    def _renders_results(self) -> bool:
        result = _RESULT._replace(content=PROBE)
        return self._renders(Conversation((_USER, _call("f"), result, _ANSWER)))

    def _renders(self, probe: Conversation) -> bool:
        """Return whether the probe is rendered; a format that raises does so for records too."""
        try:
            segments = self._chat.render(probe)
        except (MalformedRecord, UnusableRecord):
            return True
        texts = [part for segment in segments for part in segment.parts if isinstance(part, str)]
        return any(PROBE in text for text in texts)


_USER, _ANSWER = Message("user", "a"), Message("assistant", "b")
_RESULT = Message("observation", "c", call_id="000000000")


def _call(name: str) -> Message:
    return Message(
        "assistant", "", calls=dump([{"id": "000000000", "name": name, "arguments": {}}])
    )


def _names(conversation: Conversation) -> str:
    """Name the tools that a conversation describes."""
    tools = read_tools(conversation.tools)
    inner = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    names = [str(one.get("name")) if isinstance(one, dict) else str(one) for one in inner]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
