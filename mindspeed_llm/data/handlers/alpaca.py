"""Alpaca layouts: a prompt and a response per record, or reasoning steps with their rewards."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mindspeed.config import ConfigError
from mindspeed_llm.data.chat import Segment
from mindspeed_llm.data.conversation import Conversation, MalformedRecord, Message, UnusableRecord
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.handlers.base import (
    INSTRUCTION,
    PAIRWISE,
    UNPAIRED,
    Context,
    Handler,
    Output,
    Record,
    UnpairedHandler,
    as_text,
    distinct,
    train_last_completion,
)
from mindspeed_llm.data.readers import kind_of

LAYOUTS = (
    {"prompt": "instruction", "query": "input", "response": "output"},
    {"prompt": "prompt", "query": "input", "response": "response"},
    {"prompt": "prompt", "query": "input", "response": "answer"},
)
"""Common names of the same three columns; the first whose columns are present is used."""


class AlpacaStyleInstructionHandler(Handler):
    """Questions with their answers: instruction, input, output; history, system, tools if any."""

    outputs: ClassVar[tuple[Output, ...]] = INSTRUCTION
    roles: ClassVar[Mapping[str, str]] = {
        **LAYOUTS[0],
        "history": "history",
        "system": "system",
        "tools": "tools",
    }
    required: ClassVar[tuple[str, ...]] = ("prompt", "response")
    for_messages: ClassVar[str] = ""
    """The handler of the same kind of data for prompts that are messages."""

    @classmethod
    def _defaults(cls, map_keys: Mapping[str, Any], present: Sequence[str]) -> dict[str, str]:
        for layout in LAYOUTS:
            names = {role: layout.get(role, name) for role, name in cls.roles.items()}
            if all(names[role] in present for role in cls.required):
                break
        else:
            names = dict(cls.roles)
        if map_keys:
            # With --map-keys, earlier turns and system prompts are opt-in.
            names |= {"history": "", "system": ""}
        return {r: n for r, n in names.items() if r in cls.required or n in present}

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the conversation."""
        answer = Message("assistant", self._text(record, "response"))
        return [self._render_chat(self._conversation(record, answer).check())]

    def _conversation(self, record: Record, *answer: Message) -> Conversation:
        prompt, query = self._text(record, "prompt"), self._text(record, "query")
        question = f"{prompt}\n{query}" if prompt and query else prompt or query
        messages = (*self._history(record), Message("user", question), *answer)
        return Conversation(messages, self._text(record, "system"), self._tools(record))

    def _text(self, record: Record, role: str) -> str:
        column = self._columns[role]
        value = record.get(column) if column else None
        if self.for_messages and isinstance(value, (list, dict)):
            raise MalformedRecord(
                f"{column} holds {kind_of(value)}, not text: for messages give --handler-name "
                f"{self.for_messages}"
            )
        return super()._text(record, role)

    def _history(self, record: Record) -> list[Message]:
        column = self._columns["history"]
        turns = record.get(column) if column else None
        if not turns:
            return []
        if not isinstance(turns, list) or any(
            not isinstance(turn, list) or len(turn) != 2 for turn in turns
        ):
            raise MalformedRecord(f"{column} must be a list of [question, answer] pairs")
        messages = []
        for question, answer in turns:
            messages.append(Message("user", as_text(question, column)))
            messages.append(Message("assistant", as_text(answer, column)))
        return messages


class AlpacaStylePairwiseHandler(AlpacaStyleInstructionHandler):
    """Prompts with a better and a worse response: chosen, rejected."""

    outputs = PAIRWISE
    roles = {**AlpacaStyleInstructionHandler.roles, "chosen": "chosen", "rejected": "rejected"}
    required = ("prompt", "chosen", "rejected")
    for_messages = "OpenAIPairwiseHandler"

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the conversation twice, with either response."""
        tracks = []
        for role in ("chosen", "rejected"):
            answer = Message("assistant", self._text(record, role))
            segments = self._render_chat(self._conversation(record, answer).check())
            tracks.append(train_last_completion(segments))
        return distinct(tracks)


class AlpacaStyleKTOHandler(UnpairedHandler, AlpacaStyleInstructionHandler):
    """Questions with an answer, and whether that is desirable: {"label": true}."""

    outputs = UNPAIRED
    roles = {**AlpacaStyleInstructionHandler.roles, "kto_tag": "label"}
    required = ("prompt", "response", "kto_tag")
    for_messages = "OpenAIKTOHandler"

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the conversation; only its last answer is trained."""
        answer = Message("assistant", self._text(record, "response"))
        segments = self._render_chat(self._conversation(record, answer).check())
        return [train_last_completion(segments)]


class AlpacaStyleProcessRewardHandler(Handler):
    """{"input": text with a placeholder after every step, "value": the verdict on each}."""

    outputs = INSTRUCTION
    roles = {"prompt": "input", "value": "value"}
    required: ClassVar[tuple[str, ...]] = ("prompt", "value")
    needs_chat = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._placeholder = context.placeholder_token
        self._placeholder_id = self._one_token("--placeholder-token", self._placeholder)
        rewards = context.reward_tokens
        self._rewards = {reward: self._one_token("--reward-tokens", reward) for reward in rewards}

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the steps; the label of a placeholder is the verdict."""
        steps = self._text(record, "prompt").split(self._placeholder)
        verdicts = self._verdicts(record)
        if len(verdicts) != len(steps) - 1:
            raise UnusableRecord("another number of verdicts than placeholders")
        return [self._render_steps(steps, verdicts)]

    def _render_steps(self, steps: Sequence[str], verdicts: Sequence[int]) -> list[Segment]:
        """Render a placeholder after every step that has a verdict; the last one has none."""
        segments = []
        for step, verdict in zip(steps, verdicts):
            segments += [
                Segment([step] if step else [], False),
                Segment([self._placeholder_id], False, verdict),
            ]
        return [*segments, *([Segment([steps[-1]], False)] if steps[-1] else [])]

    def _verdicts(self, record: Record) -> list[int]:
        column = self._columns["value"]
        values = record.get(column)
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise MalformedRecord(f"{column} holds {kind_of(values)}, not a list of texts")
        if not self._context.reward_tokens:
            new_values = dict.fromkeys(value for value in values if value not in self._rewards)
            self._rewards |= {value: self._one_token(column, value) for value in new_values}
        unknown = [value for value in values if value not in self._rewards]
        if unknown:
            raise MalformedRecord(f"{column} holds {unknown[0]!r}, which is no --reward-tokens")
        return [self._rewards[value] for value in values]

    def _one_token(self, name: str, text: str) -> int:
        return one_token(self._context.encoder, name, text)


class StepwiseProcessRewardHandler(AlpacaStyleProcessRewardHandler):
    """{"prompt": text, "completions": the steps, "labels": whether each is right}.

    The verdicts are the first two --reward-tokens, for right and wrong steps: + and - by default.
    """

    roles = {"prompt": "prompt", "steps": "completions", "value": "labels"}
    required = ("prompt", "steps", "value")

    def render(self, record: Record) -> list[list[Segment]]:
        """Render the steps, each on a line of its own."""
        steps, labels = (record.get(self._columns[role]) for role in ("steps", "value"))
        if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
            raise MalformedRecord(f"{self._columns['steps']} holds no list of texts")
        if not isinstance(labels, list) or not all(isinstance(label, bool) for label in labels):
            raise MalformedRecord(f"{self._columns['value']} holds no list of true and false")
        if not steps or len(labels) != len(steps):
            raise UnusableRecord("there are not as many labels as steps")
        right, wrong = (*self._context.reward_tokens, "+", "-")[:2]
        verdicts = [self._one_token("--reward-tokens", right if ok else wrong) for ok in labels]
        first = f"{self._text(record, 'prompt')}\n{steps[0]}"
        lines = [first, *(f"\n{step}" for step in steps[1:]), ""]
        return [self._render_steps(lines, verdicts)]


def one_token(encoder: TextEncoder, name: str, text: str) -> int:
    """Return the id of a text that is one token; raise, with the option's name, if it is not."""
    ids = [*encoder.encode([text], continued=True)[0]] if text else []
    if len(ids) != 1:
        raise ConfigError(
            f"{name} {text!r} is {len(ids)} tokens of this tokenizer: give a text that is exactly "
            "one, in the command and in the data"
        )
    return int(ids[0])
