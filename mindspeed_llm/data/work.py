"""The work on one block: read records, encode them, count what became of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mindspeed_llm.data.chat import ChatFormat, TemplateFormat, Thinking
from mindspeed_llm.data.chat_jinja import JinjaFormat
from mindspeed_llm.data.conversation import MalformedRecord, UnusableRecord
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.handlers import HANDLERS, PRETRAIN, Columns, Context
from mindspeed_llm.data.handlers.base import Output, as_text
from mindspeed_llm.data.indexed import Array, smallest_dtype
from mindspeed_llm.data.readers import Block, Problem, read
from mindspeed_llm.data.samples import (
    IGNORED,
    Assembler,
    Sample,
    Track,
    build,
    learns_to_end,
    shorten,
)
from mindspeed_llm.data.summary import BlockCounts
from mindspeed_llm.data.template import Template, TemplateEntry
from mindspeed_llm.data.tokenizer import TokenizerFacts

CHECKED_FIRST, CHECKED_LATER = 50_000, 500
"""Characters of the first and of later blocks on which the accelerator is compared."""


@dataclass(frozen=True)
class Plan:
    """What every worker needs to know; it travels to other processes."""

    handler: str
    facts: TokenizerFacts
    columns: Columns
    keys: tuple[str, ...] = ()
    """Columns with plain documents."""
    template: TemplateEntry | None = None
    """None for the tokenizer's own chat template."""
    thinking: Thinking = "none"
    parse_special: bool = False
    accelerate: bool = True
    limit: int | None = None
    too_long: Literal["drop", "truncate"] = "drop"
    append_eod: bool = False
    skip_malformed: bool = False
    placeholder_token: str = ""
    reward_tokens: tuple[str, ...] = ()


@dataclass
class Encoded:
    """The tokens of a block: per file the tokens, the lengths and, for documents, their borders."""

    lines: int
    counts: BlockCounts
    data: dict[str, tuple[Array, Array, Array | None]] = field(default_factory=dict)
    stopped: tuple[int, str] | None = None
    """The line and the reason of the malformed record that ends the run."""


def make_chat(plan: Plan) -> ChatFormat:
    """Build the format in which the plan writes conversations."""
    if plan.template is None:
        return JinjaFormat(plan.facts, plan.parse_special, plan.thinking)
    return TemplateFormat(Template(plan.template, plan.facts), plan.thinking)


def make_worker(plan: Plan) -> DocumentWorker | SampleWorker:
    """Build the worker of a plan."""
    return DocumentWorker(plan) if plan.handler == PRETRAIN else SampleWorker(plan)


class _Worker:
    """What both kinds of workers share: reading, and what to do with malformed records."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._encoder = TextEncoder(
            plan.facts, parse_special=plan.parse_special, accelerate=plan.accelerate
        )
        self._to_check = CHECKED_FIRST

    def _records(self, block: Block, encoded: Encoded) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the records of a block; malformed lines are counted or end the block."""
        rows, encoded.lines = read(block)
        for line, record in rows:
            encoded.counts.records += 1
            if not isinstance(record, Problem):
                yield line, record
            elif self._refuse(encoded, line, record.reason):
                return

    def _refuse(self, encoded: Encoded, line: int, reason: str) -> bool:
        """Count a malformed record, or stop at it and return True."""
        if self._plan.skip_malformed:
            encoded.counts.malformed.append((line, reason))
            return False
        encoded.stopped = (line, reason)
        return True

    def _check(self, texts: list[str]) -> None:
        """Compare the accelerator on some of this block: more on the first, a little on others."""
        if texts:
            left, samples = self._to_check, []
            for text in texts[len(texts) // 2 :]:
                samples.append(text[:left])
                left -= len(samples[-1])
                if left <= 0:
                    break
            self._encoder.check(samples)
            self._to_check = CHECKED_LATER


class DocumentWorker(_Worker):
    """Encodes plain documents, a column a file."""

    def __call__(self, block: Block) -> Encoded:
        """Encode one block."""
        encoded = Encoded(0, BlockCounts())
        texts: dict[str, list[str]] = {key: [] for key in self._plan.keys}
        lines: list[int] = []
        for line, record in self._records(block, encoded):
            try:
                found = [self._document(record, key) for key in self._plan.keys]
            except MalformedRecord as error:
                if self._refuse(encoded, line, str(error)):
                    break
                continue
            lines.append(line)
            for key, text in zip(self._plan.keys, found):
                texts[key].append(text)
        encoded.counts.written = len(lines)
        for key, documents in texts.items():
            self._check(documents)
            encoded.data[key] = self._encode(documents, lines, encoded.counts)
        return encoded

    def _document(self, record: dict[str, Any], key: str) -> str:
        if key not in record:
            raise MalformedRecord(f"has no {key}; it has {', '.join(record)}")
        return as_text(record[key], key)

    def _encode(
        self, texts: list[str], lines: list[int], counts: BlockCounts
    ) -> tuple[Array, Array, Array]:
        """Encode documents as Megatron stores them: an empty one has no sequence but a border."""
        facts = self._plan.facts
        ids = self._encoder.encode_long(texts)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        full = lengths > 0
        dtype = smallest_dtype(facts.size)
        if self._plan.append_eod:
            final = np.array([facts.eos_id], dtype)
            ids = [part for one in ids if len(one) for part in (one, final)]
            lengths[full] += 1
        tokens = np.concatenate([*ids, np.zeros(0, dtype)], dtype=dtype, casting="unsafe")
        if len(lengths):
            place = int(lengths.argmax())
            counts.measure(int(lengths[place]), lines[place])
        counts.tokens += len(tokens)
        counts.learnt += len(tokens)
        return tokens, lengths[full], np.cumsum(full)


class SampleWorker(_Worker):
    """Encodes conversations and what else has prompts and answers."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        handler = HANDLERS[plan.handler]
        self._chat = make_chat(plan) if handler.needs_chat else None
        context = Context(
            plan.columns, self._encoder, self._chat, plan.placeholder_token, plan.reward_tokens
        )
        self._handler = handler(context)
        eos_id = self._chat.eos_id if self._chat else plan.facts.eos_id
        self._stop_ids = self._chat.stop_ids if self._chat else ()
        if eos_id is not None:
            self._stop_ids = (*self._stop_ids, eos_id)
        self._assembler = Assembler(self._encoder, eos_id if plan.append_eod else None)

    def __call__(self, block: Block) -> Encoded:
        """Encode one block."""
        encoded = Encoded(0, BlockCounts())
        rendered, lines = [], []
        for line, record in self._records(block, encoded):
            try:
                rendered.append(self._handler.render(record))
                lines.append(line)
            except UnusableRecord as error:
                encoded.counts.drop(str(error), line)
            except MalformedRecord as error:
                if self._refuse(encoded, line, str(error)):
                    break
        texts = [p for tracks in rendered for piece in tracks[0] for p in piece.parts]
        self._check([text for text in texts if isinstance(text, str)])
        tracks = iter(self._assembler.encode([track for r in rendered for track in r]))
        groups = [[next(tracks) for _ in r] for r in rendered]
        kept = [self._fit(group, line, encoded.counts) for group, line in zip(groups, lines)]
        samples = [group for group in kept if group is not None]
        encoded.counts.written = len(samples)
        encoded.data = {out.key: _column(samples, out) for out in self._handler.outputs}
        return encoded

    def _fit(self, tracks: list[Track], line: int, counts: BlockCounts) -> list[Sample] | None:
        """Cut or drop what is too long or holds nothing to learn, and count what remains."""
        sizes = [sum(piece.size for piece in track) for track in tracks]
        limit = self._plan.limit
        counts.measure(max(sizes), line)
        is_cut = limit is not None and max(sizes) > limit
        if is_cut and self._plan.too_long == "drop":
            counts.drop(f"longer than {limit} tokens", line)
            return None
        samples = [build(shorten(track, limit) if is_cut else track) for track in tracks]  # type: ignore[arg-type]
        learnt = [int((sample.labels != IGNORED).sum()) for sample in samples]
        if min(learnt) == 0 and self._handler.learns:
            counts.drop("nothing to learn", line)
            return None
        if min(len(sample.ids) for sample in samples) == 0:
            counts.drop("no tokens", line)
            return None
        if is_cut:
            counts.truncated.append(line)
        counts.tokens += sum(len(sample.ids) for sample in samples)
        counts.learnt += sum(learnt)
        counts.ended += all(learns_to_end(sample.labels, self._stop_ids) for sample in samples)
        return samples


def _column(samples: list[list[Sample]], output: Output) -> tuple[Array, Array, None]:
    """Join what one file takes of the samples."""
    chosen = [group[output.track] for group in samples]
    lengths = np.fromiter((len(sample.ids) for sample in chosen), np.int64, len(chosen))
    if output.content == "ones":
        return np.ones(int(lengths.sum()), np.int32), lengths, None
    parts = [sample.ids if output.content == "ids" else sample.labels for sample in chosen]
    return np.concatenate([*parts, np.zeros(0, np.int32)], dtype=np.int32), lengths, None
