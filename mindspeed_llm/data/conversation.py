"""Conversations that handlers build from records, with tools and calls; invalid records."""

import json
from typing import Any, Literal, NamedTuple

from mindspeed.config import parse_json

Role = Literal["user", "assistant", "observation"]


class MalformedRecord(Exception):
    """The record is not in the handler's layout: the run stops, or skips it if so configured."""


class UnusableRecord(Exception):
    """The record is well formed but cannot be trained on: it is dropped and counted."""


class Message(NamedTuple):
    """One message: of the user, of the model, or the result of a tool that the model called."""

    role: Role
    content: str
    calls: str = ""
    """Calls of tools by the model, as JSON text."""
    call_id: str = ""
    """For a result: the id of the call, where the data names it."""
    before: "tuple[Message, ...]" = ()
    """For a result: the results before it, where several tools were called at once."""
    is_trained: bool = True
    """For an answer: whether it is trained, or only part of the prompt of a later one."""


class Conversation(NamedTuple):
    """Messages that alternate between prompts and completions, a prompt first."""

    messages: tuple[Message, ...]
    system: str = ""
    tools: str = ""

    def check(self, *, answered: bool = True) -> "Conversation":
        """Return this conversation if its messages alternate, else raise UnusableRecord."""
        if not self.messages:
            raise UnusableRecord("there are no messages")
        for index, message in enumerate(self.messages):
            if (message.role == "assistant") != bool(index % 2):
                raise UnusableRecord("the roles do not take turns")
        if len(self.messages) % 2 == answered:
            raise UnusableRecord(f"the last message is no {'answer' if answered else 'question'}")
        if not all(message.content.strip() or message.calls for message in self.messages[1::2]):
            raise UnusableRecord("an answer is empty")
        return self


class Call(NamedTuple):
    """One call of a tool; the arguments are JSON text."""

    name: str
    arguments: str
    id: str = ""


def read_tools(tools: str) -> list[Any]:
    """Read the list of tools, each as {"type": "function", "function": ...}; "" holds none."""
    if not tools.strip():
        return []
    found = _from_json(tools, "tools")
    return [_function(tool) for tool in (found if isinstance(found, list) else [found])]


def tool_lines(tools: str) -> str:
    """Write tools as one line of JSON each."""
    return "\n".join(map(dump, read_tools(tools)))


def read_calls(calls: str) -> list[Call]:
    """Read calls; both {"name", "arguments"} and that inside {"function": ...} are understood."""
    if not calls.strip():
        return []
    found = _from_json(calls, "a call of a tool")
    return [_call(entry) for entry in (found if isinstance(found, list) else [found])]


def dump(value: object) -> str:
    """Write JSON as chat templates do."""
    return json.dumps(value, ensure_ascii=False)


def _function(tool: Any) -> Any:
    """Wrap a bare {"name", "description", "parameters"}: chat templates expect functions."""
    if not isinstance(tool, dict) or "name" not in tool or "function" in tool:
        return tool
    bare = {key: value for key, value in tool.items() if (key, value) != ("type", "function")}
    return {"type": "function", "function": bare}


def _call(entry: Any) -> Call:
    inner = entry.get("function", entry) if isinstance(entry, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise MalformedRecord('a call of a tool must be {"name": ..., "arguments": ...}')
    arguments = inner.get("arguments")
    values = parse_arguments(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    written = values if isinstance(values, str) else dump(values)
    return Call(inner["name"], written, str(entry.get("id") or ""))


def parse_arguments(arguments: str) -> Any:
    """Read arguments that are JSON in a text, as OpenAI's are; other text stays text."""
    try:
        return parse_json(arguments)
    except ValueError:
        return arguments


def _from_json(text: str, what: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise MalformedRecord(f"{what} is not valid JSON: {error}") from None
