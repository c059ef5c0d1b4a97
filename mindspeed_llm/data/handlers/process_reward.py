"""Solutions whose every step was judged: a placeholder behind each step, and its verdict."""

from mindspeed.config import ConfigError
from mindspeed_llm.data.chat import Piece
from mindspeed_llm.data.conversation import MalformedRecord, UnusableRecord
from mindspeed_llm.data.handlers.base import INSTRUCTION, Context, Handler, Record
from mindspeed_llm.data.readers import kind_of


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
