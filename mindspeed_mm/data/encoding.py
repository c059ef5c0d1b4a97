"""Encode a record as a sample: tokens, labels, and the tensors of its images and videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed.config import ConfigError
from mindspeed_llm.data.chat import CheckedFormat, Part, Segment, Thinking
from mindspeed_llm.data.chat_jinja import JinjaFormat
from mindspeed_llm.data.conversation import Conversation, MalformedRecord, Message, UnusableRecord
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.indexed import IGNORE_INDEX, Array
from mindspeed_llm.data.samples import SampleEncoder
from mindspeed_llm.data.template import Template, TemplateFormat, load_template
from mindspeed_llm.data.tokenizer import TokenizerFacts, special_matcher, split_special
from mindspeed_mm.data.media import Modality
from mindspeed_mm.data.options import OWN_TEMPLATES, BasicOptions, DatasetOptions
from mindspeed_mm.data.processor import Expansion, MediaProcessor
from mindspeed_mm.data.records import SENTINEL, SENTINEL_OF, SENTINELS, ParsedRecord, RecordParser


class MediaFormat:
    """Renders conversations with the processor's token for each image or video."""

    def __init__(self, facts: TokenizerFacts, tokens: Mapping[Modality, int], basic: BasicOptions):
        self._facts, self._special = facts, special_matcher(facts)
        self.tokens = dict(tokens)
        thinking: Thinking = "none"
        if basic.enable_thinking is not None:
            thinking = "true" if basic.enable_thinking else "false"
        own = StructuredJinja(facts, thinking) if facts.chat_template else None
        chat: StructuredJinja | TemplateFormat
        if basic.template not in OWN_TEMPLATES:
            chat = _load_format(basic.template, facts, thinking)
        elif own is not None:
            chat = own
        else:
            raise ConfigError(
                f"template {basic.template}: {facts.source} has no chat template; "
                "set one of configs/finetune/templates.json"
            )
        self._chat = CheckedFormat(chat, facts, option="template")
        self._media_parts = {modality: self._rendered_by(own, modality) for modality in tokens}

    def render(self, conversation: Conversation) -> list[Segment]:
        """Render the conversation as pieces of prompt and answer."""
        segments = self._chat.render(conversation)
        return [segment._replace(parts=self._insert_media(segment.parts)) for segment in segments]

    def _insert_media(self, parts: Sequence[Part]) -> list[Part]:
        inserted: list[Part] = []
        for part in parts:
            for text in SENTINEL.split(part) if isinstance(part, str) else [part]:
                inserted += self._media_parts[SENTINELS[text]] if text in SENTINELS else [text]
        return [part for part in inserted if part != ""]

    def _rendered_by(self, own: StructuredJinja | None, modality: Modality) -> list[Part]:
        """Return the parts of an image or video, for templates that only support text."""
        text = own.render_media(modality) if own is not None else None
        parts = split_special(text, self._special, self._facts) if text else []
        return parts if self.tokens[modality] in parts else [self.tokens[modality]]


class StructuredJinja(JinjaFormat):
    """The model's own chat template; contents are lists of parts if it supports them."""

    def __init__(self, facts: TokenizerFacts, thinking: Thinking) -> None:
        self._structured = True
        super().__init__(facts, thinking=thinking)
        self._structured = "'type'" not in (probe := self._probe("image")) and "(A" in probe

    def render_media(self, modality: Modality) -> str | None:
        """Return what the template renders for an image or video between two texts, if any."""
        if not self._structured:
            return None
        _, found, rest = self._probe(modality).partition("(A")
        text, end, _ = rest.partition("B)")
        return text if found and end else None

    def _probe(self, modality: Modality) -> str:
        message = Message("user", f"(A{SENTINEL_OF[modality]}B)")
        try:
            return self._render_text(self._messages(Conversation((message,))), None, generate=False)
        except MalformedRecord:
            return ""

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        messages = super()._messages(conversation)
        if self._structured:
            for message in messages:
                message["content"] = _content_parts(message["content"])
        return messages


def _content_parts(text: str) -> list[dict[str, str]]:
    segments = [segment for segment in SENTINEL.split(text) if segment]
    return [
        {"type": SENTINELS[segment]} if segment in SENTINELS else {"type": "text", "text": segment}
        for segment in segments
    ]


def _load_format(name: str, facts: TokenizerFacts, thinking: Thinking) -> TemplateFormat:
    try:
        return TemplateFormat(Template(load_template(name), facts), thinking)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--prompt-type", "template", 1)) from None


@dataclass(frozen=True)
class Sample:
    """A sequence; `attention_mask` is 0 for tokens of blank media."""

    ids: Array
    labels: Array
    attention_mask: Array
    token_types: dict[str, Array] = field(default_factory=dict)
    tensors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    modalities: frozenset[Modality] = frozenset()

    def __len__(self) -> int:
        return len(self.ids)

    def without_labels(self) -> Sample:
        """Return this sample without a loss."""
        return replace(self, labels=np.full_like(self.labels, IGNORE_INDEX))


def text_sample(ids: Array, *, is_trained: bool) -> Sample:
    """Return a sample of text."""
    ids = ids.astype(np.int64)
    labels = ids.copy() if is_trained else np.full_like(ids, IGNORE_INDEX)
    return Sample(ids, labels, np.ones_like(ids))


def media_sample(expansion: Expansion, modality: Modality, *, is_attended: bool = True) -> Sample:
    """Return a sample of an image or a video, whose tokens have no loss."""
    ids = expansion.ids.astype(np.int64)
    tensors = {name: [tensor] for name, tensor in expansion.tensors.items()}
    return Sample(
        ids,
        np.full_like(ids, IGNORE_INDEX),
        np.full_like(ids, int(is_attended)),
        expansion.token_types,
        tensors,
        frozenset([modality]),
    )


def concatenate(samples: Sequence[Sample]) -> Sample:
    """Concatenate samples; token types that one of them lacks are 0 there."""
    names = sorted({name for sample in samples for name in sample.token_types})
    token_types = {
        name: np.concatenate([s.token_types.get(name, np.zeros_like(s.ids)) for s in samples])
        for name in names
    }
    tensors: dict[str, list[torch.Tensor]] = {}
    for sample in samples:
        for name, found in sample.tensors.items():
            tensors.setdefault(name, []).extend(found)
    return Sample(
        np.concatenate([sample.ids for sample in samples]),
        np.concatenate([sample.labels for sample in samples]),
        np.concatenate([sample.attention_mask for sample in samples]),
        token_types,
        tensors,
        frozenset().union(*(sample.modalities for sample in samples)),
    )


class Encoder:
    """Encodes records as samples."""

    def __init__(self, options: DatasetOptions, processor: MediaProcessor) -> None:
        basic = options.basic_parameters
        self._basic, self._processor = basic, processor
        facts = processor.facts
        text = TextEncoder(facts, parse_special=False, accelerate=False)
        self._sample_encoder = SampleEncoder(text)
        self._parser = RecordParser(options.attr, text, basic.dataset_dir)
        self._format = MediaFormat(facts, processor.tokens, basic)
        self._prefix = processor.prefix if basic.template in OWN_TEMPLATES else []
        self._slots = {token: modality for modality, token in processor.tokens.items()}

    def parse(self, record: Mapping[str, Any], folder: Path) -> ParsedRecord:
        """Parse a record without opening its images and videos."""
        parsed = self._parser.parse(record, folder)
        for medium in parsed.media:
            self._processor.check(medium.modality)
        return parsed

    def encode(self, record: Mapping[str, Any], folder: Path) -> Sample:
        """Encode a record; MalformedRecord or UnusableRecord says why it cannot be used."""
        parsed = self.parse(record, folder)
        segments = self._format.render(parsed.conversation)
        if self._basic.mask_history:
            segments = _only_last_answer(segments)
        media: dict[Modality, list[Expansion]] = {modality: [] for modality in self._slots.values()}
        for medium in parsed.media:
            media[medium.modality].append(self._processor.expand(medium))
        parts = self._parts(self._with_prefix(segments), media)
        limit = self._basic.cutoff_len
        sample = concatenate(parts if limit is None else _truncate(parts, limit))
        if not (sample.labels != IGNORE_INDEX).any():
            raise UnusableRecord("no token with a loss is left")
        return sample

    def _with_prefix(self, segments: list[Segment]) -> list[Segment]:
        """Prepend the tokenizer's prefix tokens, unless the template did."""
        prefix, first = self._prefix, segments[0]
        if not prefix or first.parts[:1] == prefix[:1]:
            return segments
        return [first._replace(parts=[*prefix, *first.parts]), *segments[1:]]

    def _parts(
        self, segments: Sequence[Segment], media: Mapping[Modality, list[Expansion]]
    ) -> list[Sample]:
        """Encode the pieces; every media token becomes the expansion of the processor."""
        parts: list[Sample] = []
        for segment in self._sample_encoder.encode([segments])[0]:
            is_trained = segment.is_completion or self._basic.train_on_prompt
            first_label = segment.first_label
            for ids in segment.parts:
                modality = self._slots.get(int(ids[0])) if len(ids) == 1 else None
                if modality is None:
                    part = text_sample(ids, is_trained=is_trained)
                elif media[modality]:
                    part = media_sample(media[modality].pop(0), modality)
                else:
                    raise MalformedRecord(f"the chat template renders one {modality} too many")
                if first_label is not None and len(part):
                    part.labels[0], first_label = first_label, None
                parts.append(part)
        for modality, remaining in media.items():
            if remaining:
                raise MalformedRecord(f"the chat template omits {len(remaining)} {modality}(s)")
        return parts


def _only_last_answer(segments: Sequence[Segment]) -> list[Segment]:
    """Train on the last answer only; a template may add a line break after it."""
    last = max(
        (index for index, segment in enumerate(segments) if segment.is_completion), default=-1
    )
    while last > 0 and segments[last - 1].is_completion:
        last -= 1
    return [Segment(p.parts, p.is_completion and i >= last) for i, p in enumerate(segments)]


def _truncate(parts: Sequence[Sample], limit: int) -> list[Sample]:
    """Keep the first `limit` tokens; an image or a video is never cut."""
    kept: list[Sample] = []
    budget = limit
    for part in parts:
        if len(part) > budget:
            if part.modalities and budget:
                (modality,) = part.modalities
                raise MalformedRecord(
                    f"the {modality} after token {limit - budget} has {len(part)} tokens and would "
                    f"be truncated at {limit}: raise the sequence length or lower "
                    f"{modality}_max_pixels"
                )
            ids, labels = part.ids[:budget], part.labels[:budget]
            kept.append(Sample(ids, labels, part.attention_mask[:budget]))
            break
        kept.append(part)
        budget -= len(part)
    return kept
