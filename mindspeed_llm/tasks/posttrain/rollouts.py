"""Prompts and their sampled completions, and how they become the micro-batches of an update."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mindspeed.config import ConfigError
from mindspeed_llm.data.indexed import IGNORE_INDEX
from mindspeed_llm.data.instruction import FIELDS
from mindspeed_llm.data.stream import Sample
from mindspeed_llm.generation.rollout import Completion
from mindspeed_llm.tasks.posttrain.base import Batch
from mindspeed_llm.tasks.posttrain.rows import Rows, last_tokens

LAST_TOKENS = "last_tokens"
"""Where a micro-batch has the flat index of the last token of every sequence."""


@dataclass(frozen=True)
class Prompt:
    """A prompt with its number in the run, and what its record has beside it."""

    number: int
    tokens: tuple[int, ...]
    record: Sequence[int] = b"{}"
    """The bytes of JSON, as they are stored."""

    @property
    def fields(self) -> dict[str, Any]:
        """What the record has beside the prompt; raises ConfigError if the data is damaged."""
        try:
            found = json.loads(bytes(self.record))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ConfigError(
                f"the fields of prompt {self.number} are damaged (no JSON object): preprocess again"
            )
        return found


@dataclass
class Rollout:
    """A completion of a prompt, and what it is worth."""

    prompt: Prompt
    completion: Completion
    is_ended: bool
    """Whether it ends with a stop token."""
    reward: float = field(default=0.0)
    parts: dict[str, float] = field(default_factory=dict)
    """The rewards that it is the sum of, where a function names them."""

    def sample(self, answer_end: Sequence[int] = ()) -> Sample:
        """Return the whole sequence, of which the completion is trained.

        With `answer_end` it is for a model that only reads it: a completion that has ended is
        given this end.
        """
        prompt, answer = self.prompt.tokens, self.completion.tokens
        if answer_end and self.is_ended:
            answer = _with_end(answer, tuple(answer_end))
        ids = np.array([*prompt, *answer])
        labels = ids.copy()
        labels[: len(prompt)] = IGNORE_INDEX
        return {"input_ids": ids, "labels": labels}


def _with_end(answer: tuple[int, ...], end: tuple[int, ...]) -> tuple[int, ...]:
    """Complete the end that an answer stops in, or put it in place of a stop token of others."""
    sizes = range(1, min(len(answer), len(end)) + 1)
    found = max((size for size in sizes if answer[-size:] == end[:size]), default=0)
    return answer + end[found:] if found else answer[:-1] + end


def collate_prompts(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Concatenate prompts, and the records that they are from."""
    records = [sample.get(FIELDS, np.frombuffer(b"{}", np.uint8)) for sample in samples]
    return {
        "tokens": _joined([sample["input_ids"] for sample in samples]),
        "lengths": torch.tensor([len(sample["input_ids"]) for sample in samples]),
        "records": _joined(records),
        "record_lengths": torch.tensor([len(record) for record in records]),
    }


def split_prompts(batch: Batch, first: int) -> Iterator[Prompt]:
    """Yield the prompts of collate_prompts; `first` is the number of the first one."""
    tokens = batch["tokens"].split(batch["lengths"].tolist())
    records = batch["records"].split(batch["record_lengths"].tolist())
    for offset, (ids, record) in enumerate(zip(tokens, records)):
        yield Prompt(first + offset, tuple(ids.tolist()), tuple(record.tolist()))


def _joined(arrays: Sequence[Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64))


def collate_rollouts(
    rollouts: Sequence[Rollout], rows: Rows, answer_end: Sequence[int] = ()
) -> dict[str, torch.Tensor]:
    """Pad or concatenate the sequences of some rollouts, and note the last token of each."""
    samples = [rollout.sample(answer_end) for rollout in rollouts]
    batch = rows.collate(samples)
    return batch | {LAST_TOKENS: last_tokens(batch, [len(each["input_ids"]) for each in samples])}


def spread(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Put values of the completions' tokens, in order, where a micro-batch predicts them."""
    mask = batch["loss_mask"].bool()
    found = torch.zeros(mask.shape)
    found[mask] = values.float()
    return found


def gather(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the values of the completions' tokens, in order, to the host: inverse of spread."""
    return values[batch["loss_mask"].bool()].float().cpu()


def padded(values: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """Return the values of tokens as rows, one a completion."""
    parts = torch.cat(list(values)).split(list(lengths))
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
