"""A record to a sample: tokens, labels, and the tensors of its images and videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_llm.data.chat import Piece
from mindspeed_llm.data.conversation import MalformedRecord, UnusableRecord
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.indexed import IGNORED, Array
from mindspeed_llm.data.samples import Assembler
from mindspeed_mm.data.chat import MediaFormat
from mindspeed_mm.data.conversations import RecordReader, Request
from mindspeed_mm.data.media import Kind
from mindspeed_mm.data.options import OWN_TEMPLATES, DatasetOptions
from mindspeed_mm.data.processor import Expansion, MediaProcessor


@dataclass(frozen=True)
class Sample:
    """A sequence; `attended` is 0 for tokens that only stand in for something."""

    ids: Array
    labels: Array
    attended: Array
    marks: dict[str, Array] = field(default_factory=dict)
    tensors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    kinds: frozenset[Kind] = frozenset()

    def __len__(self) -> int:
        return len(self.ids)

    def unlearnt(self) -> Sample:
        """Return this sample with nothing to learn."""
        return replace(self, labels=np.full_like(self.labels, IGNORED))


def text_sample(ids: Array, *, is_learnt: bool) -> Sample:
    """Make a sample of text."""
    ids = ids.astype(np.int64)
    labels = ids.copy() if is_learnt else np.full_like(ids, IGNORED)
    return Sample(ids, labels, np.ones_like(ids))


def media_sample(expansion: Expansion, kind: Kind, *, is_attended: bool = True) -> Sample:
    """Make a sample of an image or a video: it is never trained."""
    ids = expansion.ids.astype(np.int64)
    tensors = {name: [tensor] for name, tensor in expansion.tensors.items()}
    return Sample(
        ids,
        np.full_like(ids, IGNORED),
        np.full_like(ids, int(is_attended)),
        expansion.marks,
        tensors,
        frozenset([kind]),
    )


def concatenate(samples: Sequence[Sample]) -> Sample:
    """Join samples; marks that one of them does not have are 0 there."""
    names = sorted({name for sample in samples for name in sample.marks})
    marks = {
        name: np.concatenate([s.marks.get(name, np.zeros_like(s.ids)) for s in samples])
        for name in names
    }
    tensors: dict[str, list[torch.Tensor]] = {}
    for sample in samples:
        for name, found in sample.tensors.items():
            tensors.setdefault(name, []).extend(found)
    return Sample(
        np.concatenate([sample.ids for sample in samples]),
        np.concatenate([sample.labels for sample in samples]),
        np.concatenate([sample.attended for sample in samples]),
        marks,
        tensors,
        frozenset().union(*(sample.kinds for sample in samples)),
    )


class Encoder:
    """Makes samples of records."""

    def __init__(self, options: DatasetOptions, processor: MediaProcessor) -> None:
        basic = options.basic_parameters
        self._basic, self._processor = basic, processor
        facts = processor.facts
        text = TextEncoder(facts, parse_special=False, accelerate=False)
        self._assembler = Assembler(text)
        self._reader = RecordReader(options.attr, text, basic.dataset_dir)
        self._format = MediaFormat(facts, processor.tokens, basic)
        self._lead = processor.lead if basic.template in OWN_TEMPLATES else []
        self._slots = {token: kind for kind, token in processor.tokens.items()}

    def read(self, record: Mapping[str, Any], folder: Path) -> Request:
        """Check a record without opening its images and videos."""
        request = self._reader.read(record, folder)
        for medium in request.media:
            self._processor.check(medium.kind)
        return request

    def encode(self, record: Mapping[str, Any], folder: Path) -> Sample:
        """Make the sample of a record; say what is wrong with it, if something is."""
        request = self.read(record, folder)
        pieces = self._format.render(request.conversation)
        if self._basic.mask_history:
            pieces = _only_last_answer(pieces)
        media: dict[Kind, list[Expansion]] = {kind: [] for kind in self._slots.values()}
        for medium in request.media:
            media[medium.kind].append(self._processor.expand(medium))
        parts = self._parts(self._with_lead(pieces), media)
        limit = self._basic.cutoff_len
        sample = concatenate(parts if limit is None else _cut(parts, limit))
        if not (sample.labels != IGNORED).any():
            raise UnusableRecord("nothing to learn is left")
        return sample

    def _with_lead(self, pieces: list[Piece]) -> list[Piece]:
        """Put in front what the tokenizer would, unless the template did."""
        lead, first = self._lead, pieces[0]
        if not lead or first.parts[:1] == lead[:1]:
            return pieces
        return [first._replace(parts=[*lead, *first.parts]), *pieces[1:]]

    def _parts(
        self, pieces: Sequence[Piece], media: Mapping[Kind, list[Expansion]]
    ) -> list[Sample]:
        """Encode the pieces; every token of a medium becomes what the processor made of it."""
        parts: list[Sample] = []
        for piece in self._assembler.encode([pieces])[0]:
            is_learnt = piece.is_answer or self._basic.train_on_prompt
            first_label = piece.first_label
            for ids in piece.parts:
                kind = self._slots.get(int(ids[0])) if len(ids) == 1 else None
                if kind is None:
                    part = text_sample(ids, is_learnt=is_learnt)
                elif media[kind]:
                    part = media_sample(media[kind].pop(0), kind)
                else:
                    raise MalformedRecord(f"the chat template writes one {kind} too many")
                if first_label is not None and len(part):
                    part.labels[0], first_label = first_label, None
                parts.append(part)
        for kind, left in media.items():
            if left:
                raise MalformedRecord(f"the chat template leaves out {len(left)} {kind}(s)")
        return parts


def _only_last_answer(pieces: Sequence[Piece]) -> list[Piece]:
    """Let nothing be trained but the last answer; a template may put a line break behind it."""
    last = max((place for place, piece in enumerate(pieces) if piece.is_answer), default=-1)
    while last > 0 and pieces[last - 1].is_answer:
        last -= 1
    return [Piece(p.parts, p.is_answer and i >= last) for i, p in enumerate(pieces)]


def _cut(parts: Sequence[Sample], limit: int) -> list[Sample]:
    """Keep the first `limit` tokens; an image or a video is kept whole or not at all."""
    kept: list[Sample] = []
    room = limit
    for part in parts:
        if len(part) > room:
            if part.kinds and room:
                (kind,) = part.kinds
                raise MalformedRecord(
                    f"the {kind} behind token {limit - room} has {len(part)} tokens and would be "
                    f"cut at {limit}: raise the sequence length or lower {kind}_max_pixels"
                )
            kept.append(Sample(part.ids[:room], part.labels[:room], part.attended[:room]))
            break
        kept.append(part)
        room -= len(part)
    return kept
