"""Prompts whose completions are sampled: the fields beside them are kept for the reward."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mindspeed_llm.data.chat import Segment
from mindspeed_llm.data.conversation import Conversation
from mindspeed_llm.data.handlers.alpaca import AlpacaStyleInstructionHandler
from mindspeed_llm.data.handlers.base import PROMPTS, Handler, Output, Record
from mindspeed_llm.data.handlers.messages import SharegptStyleInstructionHandler
from mindspeed_llm.data.handlers.preferences import PreferenceHandler


class PromptHandler(Handler):
    """Renders prompts; what a record has beside the prompt is stored with it, as JSON."""

    outputs: ClassVar[tuple[Output, ...]] = PROMPTS
    has_completion = False
    is_tagged = True
    keeps_fields = True
    asked: ClassVar[tuple[str, ...]]
    """The roles whose columns make the prompt."""

    def tag(self, record: Record) -> Sequence[int]:
        """Return the fields beside the prompt, as the bytes of JSON."""
        fields = self._fields(record)
        return json.dumps(fields, ensure_ascii=False, default=str).encode("utf-8", "replace")

    def _fields(self, record: Record) -> dict[str, Any]:
        used = {self._columns[role] for role in self.asked}
        return {name: value for name, value in record.items() if name not in used}


class PPOAlpacaStyleInstructionHandler(PromptHandler, AlpacaStyleInstructionHandler):
    """Prompts in Alpaca's columns; an output is a field for the reward."""

    outputs = PROMPTS
    required = ("prompt",)
    asked = ("prompt", "query", "history", "system", "tools")
    for_messages = "OpenAIPromptHandler"

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the prompt."""
        return [self._render_chat(self._conversation(record).check(answered=False))]


class R1AlpacaStyleInstructionHandler(PPOAlpacaStyleInstructionHandler):
    """The same under another name."""


class R1SharegptStyleInstructionHandler(PromptHandler, SharegptStyleInstructionHandler):
    """Conversations; a last answer is not part of the prompt, but the field `reference`."""

    outputs = PROMPTS
    asked = ("messages", "system", "tools")
    for_messages = "OpenAIPromptHandler"

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the conversation up to the last question."""
        whole = self._conversation(record)
        if whole.messages and whole.messages[-1].role == "assistant":
            whole = Conversation(whole.messages[:-1], whole.system, whole.tools)
        return [self._render_chat(whole.check(answered=False))]

    def _fields(self, record: Record) -> dict[str, Any]:
        messages = self._conversation(record).messages
        last = messages[-1] if messages else None
        answer = {"reference": last.content} if last and last.role == "assistant" else {}
        return {**super()._fields(record), **answer}


class OpenAIPromptHandler(PromptHandler, PreferenceHandler):
    """{"prompt": a text or messages}, with any fields beside it, as TRL has them."""

    outputs = PROMPTS
    roles: ClassVar[Mapping[str, str]] = {"prompt": "prompt", "system": "system", "tools": "tools"}
    required = ("prompt",)
    asked = ("prompt", "system", "tools")

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the prompt."""
        entries = self._entries(record, "prompt", "user")
        return [self._render_chat(self._conversation(record, entries).check(answered=False))]
