"""What the policy says while it is trained: completions of each step as lines of JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed.training.json_lines import JsonLines
from mindspeed_llm.data.tokenizer import TokenizerFacts
from mindspeed_llm.tasks.posttrain.rollouts import Rollout

FILE_NAME = "completions.jsonl"


def drop_later(folder: str, iteration: int) -> None:
    """Drop the lines that an earlier run wrote beyond the iteration that this one starts after.

    Also where this one writes none: a later one that does would keep them.
    """
    JsonLines(Path(folder, FILE_NAME)).start(iteration)


class CompletionLog:
    """Writes the first completions of every step, with their prompts and rewards."""

    def __init__(self, folder: str, facts: TokenizerFacts, count: int) -> None:
        from tokenizers import Tokenizer

        self._tokenizer, self._count = Tokenizer.from_str(facts.backend), count
        self._lines = JsonLines(Path(folder, FILE_NAME))

    def add(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        """Write the completions of an iteration."""
        self._lines.append(*(self._line(iteration, each) for each in rollouts[: self._count]))

    def _line(self, iteration: int, rollout: Rollout) -> dict[str, Any]:
        line = {
            "iteration": iteration,
            "prompt": self._text(rollout.prompt.tokens),
            "completion": self._text(rollout.completion.tokens),
            "reward": rollout.reward,
            "ended": rollout.is_ended,
            "fields": rollout.prompt.fields,
        }
        return line | ({"rewards": rollout.parts} if rollout.parts else {})

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text with its special tokens: what the model reads and says."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text
