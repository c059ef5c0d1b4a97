"""One prompt and one answer a record, in columns of their own; or steps with their rewards."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mindspeed.config import ConfigError
from mindspeed_llm.data.chat import Piece
from mindspeed_llm.data.conversation import Conversation, MalformedRecord, Message, UnusableRecord
from mindspeed_llm.data.handlers.base import (
    INSTRUCTION,
    PAIRWISE,
    PROMPTS,
    Context,
    Handler,
    Output,
    Record,
    as_text,
    only_last_answer,
)
from mindspeed_llm.data.readers import kind_of

LAYOUTS = (
    {"prompt": "instruction", "query": "input", "response": "output"},
    {"prompt": "prompt", "query": "input", "response": "response"},
    {"prompt": "prompt", "query": "input", "response": "answer"},
)
"""Names that are in use for the same three columns; the first whose columns are there is meant."""


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

    @classmethod
    def _defaults(cls, map_keys: Mapping[str, Any], present: Sequence[str]) -> dict[str, str]:
        for layout in LAYOUTS:
            names = {role: layout.get(role, name) for role, name in cls.roles.items()}
            if all(names[role] in present for role in cls.required):
                break
        else:
            names = dict(cls.roles)
        if map_keys:
            # Whoever names columns means these; earlier turns and system prompts are opt-in then.
            names |= {"history": "", "system": ""}
        return {r: n for r, n in names.items() if r in cls.required or n in present}

    def render(self, record: Record) -> list[list[Piece]]:
        """Write the conversation."""
        answer = Message("assistant", self._text(record, "response"))
        return [self._write(self._conversation(record, answer).check())]

    def _conversation(self, record: Record, *answer: Message) -> Conversation:
        prompt, query = self._text(record, "prompt"), self._text(record, "query")
        question = f"{prompt}\n{query}" if prompt and query else prompt or query
        messages = (*self._history(record), Message("user", question), *answer)
        return Conversation(messages, self._text(record, "system"), self._tools(record))

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
    """Questions with a better and a worse answer: chosen, rejected."""

    outputs = PAIRWISE
    roles = {**AlpacaStyleInstructionHandler.roles, "chosen": "chosen", "rejected": "rejected"}
    required = ("prompt", "chosen", "rejected")

    def render(self, record: Record) -> list[list[Piece]]:
        """Write the conversation twice, with either answer."""
        tracks = []
        for role in ("chosen", "rejected"):
            answer = Message("assistant", self._text(record, role))
            pieces = self._write(self._conversation(record, answer).check())
            tracks.append(only_last_answer(pieces))
        return tracks


class PPOAlpacaStyleInstructionHandler(AlpacaStyleInstructionHandler):
    """Questions only: the answers are the model's own to find."""

    outputs = PROMPTS
    required = ("prompt",)
    learns = False

    def render(self, record: Record) -> list[list[Piece]]:
        """Write the prompt."""
        return [self._write(self._conversation(record).check(answered=False))]


class AlpacaStyleProcessRewardHandler(Handler):
    """{"input": text with a placeholder behind every step, "value": the verdict on each}."""

    outputs = INSTRUCTION
    roles = {"prompt": "input", "value": "value"}
    required = ("prompt", "value")
    needs_chat = False

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._placeholder = context.placeholder_token
        self._mark = self._one_token("--placeholder-token", self._placeholder)
        rewards = context.reward_tokens
        self._rewards = {reward: self._one_token("--reward-tokens", reward) for reward in rewards}

    def render(self, record: Record) -> list[list[Piece]]:
        """Write the steps; the place of a placeholder learns the verdict."""
        steps = self._text(record, "prompt").split(self._placeholder)
        verdicts = self._verdicts(record)
        if len(verdicts) != len(steps) - 1:
            raise UnusableRecord("there are not as many verdicts as placeholders")
        pieces = []
        for step, verdict in zip(steps, verdicts):
            pieces += [Piece([step] if step else [], False), Piece([self._mark], False, verdict)]
        return [[*pieces, *([Piece([steps[-1]], False)] if steps[-1] else [])]]

    def _verdicts(self, record: Record) -> list[int]:
        column = self._columns["value"]
        values = record.get(column)
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise MalformedRecord(f"{column} holds {kind_of(values)}, not a list of texts")
        if not self._context.reward_tokens:
            fresh = dict.fromkeys(value for value in values if value not in self._rewards)
            self._rewards |= {value: self._one_token(column, value) for value in fresh}
        unknown = [value for value in values if value not in self._rewards]
        if unknown:
            raise MalformedRecord(f"{column} holds {unknown[0]!r}, which is no --reward-tokens")
        return [self._rewards[value] for value in values]

    def _one_token(self, name: str, text: str) -> int:
        ids = [*self._context.encoder.encode([text], continued=True)[0]] if text else []
        if len(ids) != 1:
            raise ConfigError(
                f"{name} {text!r} is {len(ids)} tokens of this tokenizer: it must be exactly one"
            )
        return int(ids[0])
