"""Messages in the form of OpenAI's chat interface."""

from typing import Any

from mindspeed_llm.data.chat import Piece
from mindspeed_llm.data.conversation import Conversation, MalformedRecord, Message
from mindspeed_llm.data.handlers.base import INSTRUCTION, Handler, Record, as_text
from mindspeed_llm.data.readers import kind_of
from mindspeed_llm.data.tools import dump

THOUGHTS = ("<think>\n", "\n</think>\n\n")


class OpenAIInstructionHandler(Handler):
    """Conversations: messages of system, user, assistant and tool, with calls of tools.

    Messages of one role that follow each other are joined with a line break; results of tools that
    were called at once stay apart.
    """

    outputs = INSTRUCTION
    roles = {"messages": "messages", "tools": "tools"}
    required = ("messages",)

    def render(self, record: Record) -> list[list[Piece]]:
        """Write the conversation."""
        column = self._columns["messages"]
        if column not in record:
            raise MalformedRecord(f"has no {column}; it has {', '.join(record) or 'nothing'}")
        entries = record[column]
        if not isinstance(entries, list):
            raise MalformedRecord(f"{column} holds {kind_of(entries)}, not a list of messages")
        return [self._write(_conversation(entries, self._tools(record)).check())]


def _conversation(entries: list[Any], tools: str) -> Conversation:
    system: list[str] = []
    messages: list[Message] = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
            raise MalformedRecord("a message must be an object with a role and a content")
        if entry["role"] in ("system", "developer"):
            system.append(_content(entry))
        else:
            messages.append(_message(entry))
    return Conversation(tuple(_joined(messages)), "\n".join(system), tools)


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


def _content(entry: dict[str, Any]) -> str:
    """Return the text of a message, which may come in parts."""
    content = entry.get("content")
    if not isinstance(content, list):
        return as_text(content, "content")
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    for part, text in zip(content, texts):
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            raise MalformedRecord(f"a message holds {kind}: only text can be trained on here")
    return "".join(texts)


def _joined(messages: list[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or last.role != message.role or last.calls or message.calls:
            joined.append(message)
        elif message.role == "observation":
            joined[-1] = message._replace(before=(*last.before, last._replace(before=())))
        else:
            joined[-1] = Message(last.role, f"{last.content}\n{message.content}")
    return joined
