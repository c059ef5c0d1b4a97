"""A conversation as every handler delivers it, and the reasons why a record is none."""

from typing import Literal, NamedTuple

Role = Literal["user", "assistant", "observation"]


class MalformedRecord(Exception):
    """The record is not what the handler reads: the run stops, or skips it when asked to."""


class UnusableRecord(Exception):
    """The record is well formed but cannot be trained on: it is dropped and counted."""


class Message(NamedTuple):
    """One thing said: by the user, by the model, or by a tool that the model called."""

    role: Role
    content: str
    calls: str = ""
    """Calls of tools by the model, as JSON text."""
    call_id: str = ""
    """Of a result: the id of the call, where the data names it."""
    before: "tuple[Message, ...]" = ()
    """Of a result: those in front of it, where several tools were called at once."""


class Conversation(NamedTuple):
    """Messages that take turns, the first one asking."""

    messages: tuple[Message, ...]
    system: str = ""
    tools: str = ""

    def check(self, *, answered: bool = True) -> "Conversation":
        """Return this conversation if its messages take turns, else say what is wrong."""
        if not self.messages:
            raise UnusableRecord("there are no messages")
        for place, message in enumerate(self.messages):
            if (message.role == "assistant") != bool(place % 2):
                raise UnusableRecord("the roles do not take turns")
        if len(self.messages) % 2 == answered:
            raise UnusableRecord(f"the last message is no {'answer' if answered else 'question'}")
        if not all(message.content.strip() or message.calls for message in self.messages[1::2]):
            raise UnusableRecord("an answer is empty")
        return self
