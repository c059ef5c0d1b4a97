"""Preferences as TRL, OpenAI and LLaMA-Factory write them: texts or lists of messages."""

from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any, ClassVar

from mindspeed_llm.data.chat import Segment
from mindspeed_llm.data.conversation import Conversation, MalformedRecord, UnusableRecord, dump
from mindspeed_llm.data.handlers.base import (
    PAIRWISE,
    UNPAIRED,
    Handler,
    Output,
    Record,
    UnpairedHandler,
    distinct,
    train_last_completion,
)
from mindspeed_llm.data.handlers.messages import conversation_of, text_of
from mindspeed_llm.data.readers import kind_of

Entries = list[dict[str, Any]]
"""Messages, each with a role and a content."""
PROMPTS_DIFFER = "the prompts of chosen and rejected differ"
QUESTIONS = {
    "instruction": "AlpacaStylePairwiseHandler",
    "messages": "SharegptStylePairwiseHandler",
    "conversations": "SharegptStylePairwiseHandler",
    "question": "",
    "query": "",
    "input": "",
}
"""Columns that other layouts have questions in, and the handlers of these."""
PREFERRED = {"prompt": "input", "chosen": "preferred_output", "rejected": "non_preferred_output"}
"""The columns of OpenAI's preference fine-tuning; the input is an object with messages."""


class PreferenceHandler(Handler):
    """Prompts and completions that are a text or messages each."""

    def _entries(self, record: Record, role: str, author: str) -> Entries:
        """Return the messages of a column; a text is one message of the author."""
        column = self._columns[role]
        if column not in record:
            raise MalformedRecord(f"has no {column}; it has {', '.join(record) or 'nothing'}")
        value = record[column]
        if isinstance(value, str):
            return [{"role": author, "content": value}]
        if isinstance(value, dict):
            value = value.get("messages", [value])
        entries = value
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise MalformedRecord(f"{column} holds {kind_of(value)}, not a text or messages")
        return entries

    def _tools(self, record: Record) -> str:
        """Return the tools; where the prompt is an object of messages and tools, those of it."""
        prompt = record.get(self._columns["prompt"])
        tools = prompt.get("tools") if isinstance(prompt, dict) else None
        return dump(tools) if tools else super()._tools(record)

    def _render_completion(self, record: Record, entries: Entries) -> list[Segment]:
        return train_last_completion(self._render_chat(self._conversation(record, entries).check()))

    def _conversation(self, record: Record, entries: Entries) -> Conversation:
        return conversation_of(entries, self._text(record, "system"), self._tools(record))


class OpenAIPairwiseHandler(PreferenceHandler):
    """Pairs: {"prompt": ..., "chosen": ..., "rejected": ...}, with texts or messages in each.

    Without a prompt it is what chosen and rejected begin with: all messages but the last, or of
    texts the longest common beginning. LLaMA-Factory names the columns chosen_messages and
    rejected_messages, OpenAI's API input, preferred_output and non_preferred_output.
    """

    outputs: ClassVar[tuple[Output, ...]] = PAIRWISE
    roles = {
        "prompt": "prompt",
        "chosen": "chosen",
        "rejected": "rejected",
        "system": "system",
        "tools": "tools",
    }
    required = ("chosen", "rejected")
    checked = tuple(QUESTIONS)

    @classmethod
    def _defaults(cls, map_keys: Mapping[str, Any], present: Sequence[str]) -> dict[str, str]:
        names = super()._defaults(map_keys, present)
        if "preferred_output" in present and names["chosen"] not in present:
            return {**names, **PREFERRED}
        for role in cls.required:
            if names[role] not in present and f"{role}_messages" in present:
                names[role] = f"{role}_messages"
        return names

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the prompt with either completion."""
        sides = [self._entries(record, role, "assistant") for role in ("chosen", "rejected")]
        if self._columns["prompt"]:
            prompt, sides = _separate(self._entries(record, "prompt", "user"), sides)
        else:
            self._check_prompt(record, sides)
            prompt, sides = _split_prompt(record, sides, self._columns.names)
        return distinct([self._render_completion(record, [*prompt, *side]) for side in sides])

    def _check_prompt(self, record: Record, sides: list[Entries]) -> None:
        """Refuse answers whose question is in a column that is not read."""
        question = next((name for name in QUESTIONS if record.get(name)), None)
        has_messages = any(len(side) > 1 for side in sides)
        if question is None or has_messages or "prompt" in self._columns.names:
            return
        other = f"give --handler-name {name}, or " if (name := QUESTIONS[question]) else ""
        raise MalformedRecord(
            f"has no prompt, and {question} is not read: {other}name the column with --map-keys "
            f"""'{{"prompt": "{question}"}}', or switch it off with '{{"prompt": ""}}'"""
        )


class OpenAIKTOHandler(UnpairedHandler, PreferenceHandler):
    """Unpaired completions: {"prompt": ..., "completion": ..., "label": true}."""

    outputs: ClassVar[tuple[Output, ...]] = UNPAIRED
    roles = {
        "prompt": "prompt",
        "completion": "completion",
        "kto_tag": "label",
        "system": "system",
        "tools": "tools",
    }
    required = ("prompt", "completion", "kto_tag")

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the prompt with its completion."""
        prompt = self._entries(record, "prompt", "user")
        completion = self._entries(record, "completion", "assistant")
        prompt, (completion,) = _separate(prompt, [completion])
        return [self._render_completion(record, [*prompt, *completion])]


BESIDE_CONTENT = ("reasoning_content", "tool_calls", "function_call", "tool_call_id")
PROMPT_ROLES = ("system", "developer", "user")
"""Who speaks first in a conversation that is more than a completion."""


def _separate(prompt: Entries, sides: list[Entries]) -> tuple[Entries, list[Entries]]:
    """Return the prompt and its completions; data often repeats the prompt before each of them.

    A prompt may then be one question of conversations, whose other messages belong to it as well.
    """
    whole, *others = [[_said(entry) for entry in side[:-1]] for side in sides]
    if any(other != whole for other in others):
        raise UnusableRecord(PROMPTS_DIFFER)
    is_repeated = any(side and side[0].get("role") in PROMPT_ROLES for side in sides)
    if not is_repeated or not prompt or prompt[-1].get("role") != "user":
        return prompt, sides
    given = [_said(entry) for entry in prompt]
    completions = [side[-1:] for side in sides]
    if any(whole[start : start + len(given)] == given for start in range(len(whole))):
        return sides[0][:-1], completions
    # Instructions to the system may be in the prompt alone.
    first = [role for role, *_ in given].index("user")
    if first and whole[: len(given) - first] == given[first:]:
        return [*prompt[:first], *sides[0][:-1]], completions
    raise UnusableRecord("the prompt is not in the conversations of its answers")


def _said(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return all of a message that a prompt is rendered from."""
    text = text_of(entry.get("content"), "content").strip()
    return entry.get("role"), text, *(entry.get(name) or None for name in BESIDE_CONTENT)


def _split_prompt(
    record: Record, sides: list[Entries], names: Mapping[str, str]
) -> tuple[Entries, list[Entries]]:
    """Return the prompt that two conversations share, and what follows it in each."""
    texts = [record[names[role]] for role in ("chosen", "rejected")]
    if all(isinstance(text, str) for text in texts):
        start = commonprefix(texts)
        # A word belongs to one side as a whole, together with the space before it.
        start = start[:-1] if start.endswith(" ") else start
        if not start and "prompt" not in names:  # not switched off
            raise UnusableRecord(PROMPTS_DIFFER)
        ends = [[{"role": "assistant", "content": text[len(start) :]}] for text in texts]
        return [{"role": "user", "content": start}], ends
    prompts = [entries[:-1] for entries in sides]
    if prompts[0] != prompts[1]:
        raise UnusableRecord(PROMPTS_DIFFER)
    return prompts[0], [entries[-1:] for entries in sides]
