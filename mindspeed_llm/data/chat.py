"""Formats that render conversations: the protocol, and the check that nothing gets lost."""

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
"""What a rendered stretch is made of: text, and ids of special tokens."""
Thinking = Literal["true", "false", "none"]


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


PROBE = "mindspeedprobe"


class CheckedFormat:
    """Writes conversations by another format, and refuses what that format would lose.

    A chat template may ignore tools, their calls and results, and the system text without an error.
    Whether it does is found once for each, by writing a probe.
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
        self.teaches_eos = chat.teaches_eos

    def render(self, conversation: Conversation) -> list[Piece]:
        """Write prompts and answers in turn; a last prompt without answer is written too."""
        self._check_parts(conversation)
        pieces = self._chat.render(conversation)
        if not all(self._is_said(piece) for piece in pieces if piece.is_answer):
            self._check_answers(pieces)
        return pieces

    def _check_answers(self, pieces: list[Piece]) -> None:
        """Refuse an answer that says nothing; its end token may be a piece of its own."""
        answers = [list(group) for is_answer, group in groupby(pieces, _is_answer) if is_answer]
        for number, answer in enumerate(answers, 1):
            if not any(map(self._is_said, answer)):
                raise MalformedRecord(
                    f"answer {number} of {len(answers)}, written by {self.title}, is nothing but "
                    "an end token: a model would be taught to say nothing"
                )

    def _is_said(self, piece: Piece) -> bool:
        return any(map(self._says, piece.parts))

    def _check_parts(self, conversation: Conversation) -> None:
        messages = conversation.messages
        if conversation.system.strip() and not self._writes_system:
            raise MalformedRecord(f"has a system text, which {self.title} does not write")
        if conversation.tools and not self._writes_tools and read_tools(conversation.tools):
            raise self._lost(f"describes tools ({_names(conversation)})")
        if any(message.calls for message in messages) and not self._writes_calls:
            called = [call.name for message in messages for call in read_calls(message.calls)]
            raise self._lost(f"calls tools ({', '.join(dict.fromkeys(called))})")
        if not self._writes_results and any(m.role == "observation" for m in messages):
            raise self._lost("has results of tools")

    def _lost(self, what: str) -> MalformedRecord:
        return MalformedRecord(
            f"{what}, which {self.title} does not write: choose a {self._option} that writes "
            "them, such as qwen"
        )

    def _says(self, part: Part) -> bool:
        """Tell whether a part is more than white space and end tokens."""
        if isinstance(part, int):
            return part not in self.stop_ids
        if self._special is None:
            return bool(part.strip())
        parts = split_special(part, self._special, self._facts)
        return any(
            one.strip() if isinstance(one, str) else one not in self.stop_ids for one in parts
        )

    @cached_property
    def _writes_system(self) -> bool:
        return self._writes(Conversation((_USER, _ANSWER), system=PROBE))

    @cached_property
    def _writes_tools(self) -> bool:
        function = {"name": PROBE, "description": "d", "parameters": {"type": "object"}}
        return self._writes(Conversation((_USER, _ANSWER), tools=dump([function])))

    @cached_property
    def _writes_calls(self) -> bool:
        return self._writes(Conversation((_USER, _call(PROBE), _RESULT, _ANSWER)))

    @cached_property
    def _writes_results(self) -> bool:
        result = _RESULT._replace(content=PROBE)
        return self._writes(Conversation((_USER, _call("f"), result, _ANSWER)))

    def _writes(self, probe: Conversation) -> bool:
        """Tell whether the probe is found again; a format that raises does so for records too."""
        try:
            pieces = self._chat.render(probe)
        except (MalformedRecord, UnusableRecord):
            return True
        texts = [part for piece in pieces for part in piece.parts if isinstance(part, str)]
        return any(PROBE in text for text in texts)


_USER, _ANSWER = Message("user", "a"), Message("assistant", "b")
_RESULT = Message("observation", "c", call_id="000000000")


def _call(name: str) -> Message:
    return Message(
        "assistant", "", calls=dump([{"id": "000000000", "name": name, "arguments": {}}])
    )


def _is_answer(piece: Piece) -> bool:
    return piece.is_answer


def _names(conversation: Conversation) -> str:
    """Name the tools that a conversation describes."""
    tools = read_tools(conversation.tools)
    inner = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    names = [str(one.get("name")) if isinstance(one, dict) else str(one) for one in inner]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
