"""A list of messages a record, each with a tag that says who speaks."""

from collections.abc import Mapping
from typing import Any, ClassVar

from mindspeed_llm.data.chat import Piece
from mindspeed_llm.data.conversation import Conversation, MalformedRecord, Message
from mindspeed_llm.data.handlers.base import (
    INSTRUCTION,
    PAIRWISE,
    Handler,
    Output,
    Record,
    as_text,
    only_last_answer,
)
from mindspeed_llm.data.readers import kind_of


class SharegptStyleInstructionHandler(Handler):
    """Conversations: [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]."""

    outputs: ClassVar[tuple[Output, ...]] = INSTRUCTION
    roles: ClassVar[Mapping[str, str]] = {
        "messages": "conversations",
        "system": "system",
        "tools": "tools",
    }
    required: ClassVar[tuple[str, ...]] = ("messages",)
    tags = {
        "role_tag": "from",
        "content_tag": "value",
        "user_tag": "human",
        "assistant_tag": "gpt",
        "observation_tag": "observation",
        "function_tag": "function_call",
        "system_tag": "system",
    }

    def render(self, record: Record) -> list[list[Piece]]:
        """Write the conversation."""
        return [self._write(self._conversation(record).check())]

    def _conversation(self, record: Record) -> Conversation:
        column = self._columns["messages"]
        if column not in record:
            raise MalformedRecord(f"has no {column}; it has {', '.join(record) or 'nothing'}")
        entries = record[column]
        if not isinstance(entries, list):
            raise MalformedRecord(f"{column} holds {kind_of(entries)}, not a list of messages")
        messages, system = self._read(entries)
        return Conversation(
            tuple(messages),
            system=self._text(record, "system") or system,
            tools=self._tools(record),
        )

    def _read(self, entries: list[Any]) -> tuple[list[Message], str]:
        """Return the messages, and the system prompt if the first one is that."""
        messages, system = [], ""
        for place, entry in enumerate(entries):
            role, content = self._role_and_content(entry)
            if place == 0 and role == self._columns.tags["system_tag"]:
                system = content
            else:
                messages.append(self._message(role, content))
        return messages, system

    def _role_and_content(self, entry: Any) -> tuple[str, str]:
        tags = self._columns.tags
        if not isinstance(entry, dict):
            raise MalformedRecord(f"a message is {kind_of(entry)}, not an object")
        for tag in (tags["role_tag"], tags["content_tag"]):
            if tag not in entry:
                raise MalformedRecord(f"a message has no {tag}; it has {', '.join(entry)}")
        content = as_text(entry[tags["content_tag"]], tags["content_tag"])
        return as_text(entry[tags["role_tag"]], tags["role_tag"]), content

    def _message(self, role: str, content: str) -> Message:
        tags = self._columns.tags
        if role == tags["function_tag"]:
            return Message("assistant", "", calls=content)
        if role == tags["assistant_tag"]:
            return Message("assistant", content)
        if role == tags["user_tag"]:
            return Message("user", content)
        if role == tags["observation_tag"]:
            return Message("observation", content)
        names = ("user_tag", "assistant_tag", "observation_tag", "function_tag")
        allowed = ", ".join(filter(None, (tags[name] for name in names)))
        raise MalformedRecord(
            f"a message has the {tags['role_tag']} {role!r:.40}: give {allowed}, or as the first "
            f"{tags['system_tag']}; other names can be given as --map-keys tags"
        )


class SharegptStylePairwiseHandler(SharegptStyleInstructionHandler):
    """Conversations that end with a question, and a better and a worse answer to it."""

    outputs = PAIRWISE
    roles = {**SharegptStyleInstructionHandler.roles, "chosen": "chosen", "rejected": "rejected"}
    required = ("messages", "chosen", "rejected")

    def render(self, record: Record) -> list[list[Piece]]:
        """Write the conversation twice, with either answer."""
        asked = self._conversation(record).check(answered=False)
        tracks = []
        for role in ("chosen", "rejected"):
            messages = (*asked.messages, self._answer(record, role))
            whole = Conversation(messages, asked.system, asked.tools).check()
            tracks.append(only_last_answer(self._write(whole)))
        return tracks

    def _answer(self, record: Record, role: str) -> Message:
        column = self._columns[role]
        if column not in record:
            raise MalformedRecord(f"has no {column}; it has {', '.join(record)}")
        value = record[column]
        if isinstance(value, dict):
            return self._message(*self._role_and_content(value))
        return Message("assistant", as_text(value, column))
