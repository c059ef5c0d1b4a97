"""Lists of messages: ShareGPT's tags, or the roles of OpenAI's chat completions API."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mindspeed_llm.data.chat import Segment
from mindspeed_llm.data.conversation import (
    Conversation,
    MalformedRecord,
    Message,
    UnusableRecord,
    dump,
)
from mindspeed_llm.data.handlers.base import (
    INSTRUCTION,
    PAIRWISE,
    UNPAIRED,
    Handler,
    Output,
    Record,
    UnpairedHandler,
    as_text,
    distinct,
    train_last_completion,
)
from mindspeed_llm.data.readers import kind_of

THOUGHTS = ("<think>\n", "\n</think>\n\n")
UNREAD = ("tool_calls", "function_call", "reasoning_content")
"""What OpenAI's messages may have beside their content, and ShareGPT's do not."""
OPENAI_ROLES = {"user": "human", "assistant": "gpt", "tool": "observation"}
"""Roles of OpenAI's messages, and the tags of ShareGPT that mean the same."""


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
    for_messages: ClassVar[str] = "OpenAIInstructionHandler"
    """The handler of the same kind of data that reads all of OpenAI's messages."""

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the conversation."""
        return [self._render_chat(self._conversation(record).check())]

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
            system=_joined_system(self._text(record, "system"), system),
            tools=self._tools(record),
        )

    def _read(self, entries: list[Any]) -> tuple[list[Message], str]:
        """Return the messages, and the system prompt if the first one is that."""
        messages, system = [], ""
        for index, entry in enumerate(entries):
            role, content = self._role_and_content(entry)
            if index == 0 and role == self._columns.tags["system_tag"]:
                system = content
            else:
                messages.append(self._message(role, content))
        return messages, system

    @classmethod
    def _defaults(cls, map_keys: Mapping[str, Any], present: Sequence[str]) -> dict[str, str]:
        names = super()._defaults(map_keys, present)
        if names["messages"] not in present and "messages" in present:
            names["messages"] = "messages"
        return names

    def _role_and_content(self, entry: Any) -> tuple[str, str]:
        tags = self._columns.tags
        if not isinstance(entry, dict):
            raise MalformedRecord(f"a message is {kind_of(entry)}, not an object")
        if unread := next((name for name in UNREAD if entry.get(name)), None):
            raise MalformedRecord(
                f"a message has {unread}, which {type(self).__name__} does not read: give "
                f"--handler-name {self.for_messages}"
            )
        if tags is self.tags and tags["role_tag"] not in entry and "role" in entry:
            role = as_text(entry["role"], "role")
            return OPENAI_ROLES.get(role, role), text_of(entry.get("content"), "content")
        for tag in (tags["role_tag"], tags["content_tag"]):
            if tag not in entry:
                raise MalformedRecord(f"a message has no {tag}; it has {', '.join(entry)}")
        content = text_of(entry[tags["content_tag"]], tags["content_tag"])
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
    """Conversations that end with a prompt, and a better and a worse response to it."""

    outputs = PAIRWISE
    roles = {**SharegptStyleInstructionHandler.roles, "chosen": "chosen", "rejected": "rejected"}
    required = ("messages", "chosen", "rejected")
    for_messages = "OpenAIPairwiseHandler"

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the conversation twice, with either response."""
        asked = self._conversation(record).check(answered=False)
        tracks = []
        for role in ("chosen", "rejected"):
            messages = (*asked.messages, self._answer(record, role))
            whole = Conversation(messages, asked.system, asked.tools).check()
            tracks.append(train_last_completion(self._render_chat(whole)))
        return distinct(tracks)

    def _answer(self, record: Record, role: str) -> Message:
        column = self._columns[role]
        if column not in record:
            raise MalformedRecord(f"has no {column}; it has {', '.join(record)}")
        value = record[column]
        if isinstance(value, list):  # as OpenAI's preferences are, of one message
            if len(value) != 1:
                raise MalformedRecord(
                    f"{column} holds {len(value)} messages: give the answer alone, and what comes "
                    f"before it in {self._columns['messages']}"
                )
            value = value[0]
        if isinstance(value, dict):
            return self._message(*self._role_and_content(value))
        return Message("assistant", as_text(value, column))


class SharegptStyleKTOHandler(UnpairedHandler, SharegptStyleInstructionHandler):
    """Conversations, and whether the last answer is desirable: {"label": true}."""

    outputs = UNPAIRED
    roles = {**SharegptStyleInstructionHandler.roles, "kto_tag": "label"}
    required = ("messages", "kto_tag")
    for_messages = "OpenAIKTOHandler"

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the conversation; only its last answer is trained."""
        segments = self._render_chat(self._conversation(record).check())
        return [train_last_completion(segments)]


class OpenAIInstructionHandler(Handler):
    """Conversations: messages of system, user, assistant and tool, with calls of tools.

    Messages of one role that follow each other are joined with a line break; results of tools that
    were called at once stay apart. An answer with "weight": 0, or "loss": false, is not trained.
    Data from before `tools` have `functions`.
    """

    outputs = INSTRUCTION
    roles = {"messages": "messages", "system": "system", "tools": "tools"}
    required = ("messages",)

    @classmethod
    def _defaults(cls, map_keys: Mapping[str, Any], present: Sequence[str]) -> dict[str, str]:
        names = super()._defaults(map_keys, present)
        if "tools" not in present and "functions" in present:
            names["tools"] = "functions"
        return names

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the conversation."""
        column = self._columns["messages"]
        if column not in record:
            raise MalformedRecord(f"has no {column}; it has {', '.join(record) or 'nothing'}")
        entries = record[column]
        if not isinstance(entries, list):
            raise MalformedRecord(f"{column} holds {kind_of(entries)}, not a list of messages")
        found = conversation_of(
            entries, self._text(record, "system"), self._tools(record), has_weights=True
        )
        return [self._render_chat(found.check())]


def conversation_of(
    entries: list[Any], system_text: str = "", tools: str = "", *, has_weights: bool = False
) -> Conversation:
    """Read messages of system, user, assistant and tool; a column may hold a system text as well.

    `has_weights` says whether answers may have a weight.
    """
    system: list[str] = []
    messages: list[Message] = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
            raise MalformedRecord("a message must be an object with a role and a content")
        if entry["role"] in ("system", "developer"):
            if messages:
                raise UnusableRecord(f"a {entry['role']} message is not in front")
            system.append(_content(entry))
        else:
            message = _message(entry)
            if has_weights and message.role == "assistant":
                message = message._replace(is_trained=_is_weighted(entry))
            messages.append(message)
    said = _joined_system(system_text, "\n".join(system))
    return Conversation(tuple(_merge_turns(messages)), said, tools)


def _joined_system(column: str, said: str) -> str:
    """Return the system texts of a column and of messages; those that are the same count once."""
    return said if column == said else "\n".join(filter(None, (column, said)))


def _message(entry: dict[str, Any]) -> Message:
    content = _content(entry)
    if entry["role"] == "assistant":
        thoughts = as_text(entry.get("reasoning_content"), "reasoning_content")
        if thoughts:
            content = f"{THOUGHTS[0]}{thoughts}{THOUGHTS[1]}{content}"
        calls = entry.get("tool_calls") or entry.get("function_call")
        return Message("assistant", content, calls=dump(calls) if calls else "")
    if entry["role"] == "user":
        return Message("user", content)
    if entry["role"] in ("tool", "function"):
        return Message("observation", content, call_id=str(entry.get("tool_call_id") or ""))
    raise MalformedRecord(
        f"a message has the role {entry['role']!r:.40}: give system, developer, user, assistant, "
        "tool or function"
    )


def _is_weighted(entry: dict[str, Any]) -> bool:
    for name in ("weight", "loss"):  # OpenAI's name, and that of ms-swift
        value = entry.get(name)
        if value is not None and value not in (0, 1):
            raise MalformedRecord(f"a message has the {name} {value!r:.20}: give 0 or 1")
        if value == 0:
            return False
    return True


def _content(entry: dict[str, Any]) -> str:
    return text_of(entry.get("content"), "content")


def text_of(content: Any, column: str) -> str:
    """Return the text of a message, which may come in parts: {"type": "text", "text": ...}.

    LLaMA-Factory's parts have a "value" in place of "text", and may be of the type reasoning.
    """
    if not isinstance(content, list):
        return as_text(content, column)
    return "".join(map(_text_of_part, content))


TEXT_PARTS = ("text", "input_text", "output_text")


def _text_of_part(part: Any) -> str:
    entry = part if isinstance(part, dict) else {"type": "text", "value": part}
    text, kind = entry.get("text", entry.get("value")), entry.get("type") or "text"
    if not isinstance(text, str) or kind not in (*TEXT_PARTS, "reasoning"):
        found = kind if isinstance(part, dict) else kind_of(part)
        raise MalformedRecord(f"a message holds {found}: only text can be trained on here")
    return text if kind in TEXT_PARTS else f"{THOUGHTS[0]}{text}{THOUGHTS[1]}"


def _merge_turns(messages: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last is None or last.role != message.role or last.calls or message.calls:
            merged.append(message)
        elif message.is_trained != last.is_trained:
            raise MalformedRecord("answers that follow each other differ in weight: join them")
        elif message.role == "observation":
            merged[-1] = message._replace(before=(*last.before, last._replace(before=())))
        else:
            merged[-1] = last._replace(content=f"{last.content}\n{message.content}")
    return merged
