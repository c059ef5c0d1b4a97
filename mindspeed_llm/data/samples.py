"""Encode rendered conversations: token ids and labels of records, truncation, prompts."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import cached_property
from itertools import chain, compress, islice
from typing import Any, Literal, NamedTuple

import numpy as np

from mindspeed_llm.data.chat import PROBE, ChatFormat, Part, Segment, Thinking
from mindspeed_llm.data.chat_jinja import make_chat_format
from mindspeed_llm.data.conversation import (
    Conversation,
    MalformedRecord,
    Message,
    UnusableRecord,
)
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.indexed import IGNORE_INDEX, Array, smallest_dtype
from mindspeed_llm.data.template import load_template
from mindspeed_llm.data.tokenizer import TokenizerFacts

CACHED_TEXTS, MAX_CACHED_CHARS = 20_000, 256
"""Texts kept in the cache, and their longest: headers and system prompts recur."""
_NO_LABEL = -1
"""The first label of a segment without one."""
_EMPTY: Array = np.zeros(0, np.int32)
Key = str | int | tuple[str]
"""Cache key of token ids: a text, a special token or, in a tuple, the continuation of a text."""


def ends_with_stop_token(labels: Array, stop_ids: Container[int | None]) -> bool:
    """Return whether the last trained token is a stop token.

    A chat template may append more, such as a line break, which is not trained.
    """
    trained = labels[labels != IGNORE_INDEX]
    return len(trained) > 0 and int(trained[-1]) in stop_ids


class EncodedSegment(NamedTuple):
    """A segment as token ids, one array per part."""

    parts: list[Array]
    is_completion: bool
    first_label: int | None

    @property
    def size(self) -> int:
        """The number of tokens."""
        return sum(map(len, self.parts))


Track = list[EncodedSegment]


class Sequences(NamedTuple):
    """Concatenated sequences, in the form in which they are sent between processes.

    Labels repeat the ids except where nothing is trained, so the receiver builds them.
    """

    ids: Array
    lengths: Array
    document_ends: Array | None = None
    """For documents: the number of sequences up to the end of each."""
    segment_lengths: Array = _EMPTY
    """For samples: the lengths of segments that are trained as a whole or not at all."""
    is_trained: Array = _EMPTY
    """Whether each segment is trained."""
    override_positions: Array = _EMPTY
    """Positions whose label is not the token there but that of `label_overrides`."""
    label_overrides: Array = _EMPTY

    @property
    def labels(self) -> Array:
        """The label of each token, or IGNORE_INDEX."""
        labels = np.full(len(self.ids), IGNORE_INDEX, np.int32)
        trained = np.repeat(self.is_trained, self.segment_lengths)
        np.copyto(labels, self.ids, casting="unsafe", where=trained)
        labels[self.override_positions] = self.label_overrides
        return labels

    def column(self, content: Literal["ids", "labels", "ones"]) -> Array:
        """Return the values that one output file stores."""
        if content == "ones":
            return np.ones(len(self.ids), np.int32)
        return self.labels if content == "labels" else self.ids

    def count_trained(self) -> tuple[Array, Array]:
        """Return how many tokens of each sequence are trained, and the last label."""
        labels = self.labels
        positions = np.flatnonzero(labels != IGNORE_INDEX)
        upto = np.searchsorted(positions, np.cumsum(self.lengths))
        counts = np.diff(upto, prepend=0)
        trained = np.append(labels[positions], IGNORE_INDEX)
        return counts, trained[np.where(counts > 0, upto - 1, -1)]


class Batch:
    """Many sequences: which parts make up a segment, and which segments a sequence."""

    def __init__(
        self,
        tracks: Sequence[Sequence[Segment | EncodedSegment]],
        parts: list[Array],
        dtype: np.dtype[Any] = _EMPTY.dtype,
    ) -> None:
        """Take the segments of each sequence, and the ids of all their parts in order."""
        segments: list[Segment | EncodedSegment] = list(chain.from_iterable(tracks))
        count = len(segments)
        self._tracks, self._parts, self.dtype = tracks, parts, dtype
        self._segment_counts = np.fromiter(map(len, tracks), np.int64, len(tracks))
        self._part_counts = np.fromiter([len(s.parts) for s in segments], np.int64, count)
        part_lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        self._segment_lengths = _sums(part_lengths, self._part_counts)
        self._is_completion = np.fromiter([s.is_completion for s in segments], np.bool_, count)
        labels = [_NO_LABEL if s.first_label is None else s.first_label for s in segments]
        self._first_labels = np.fromiter(labels, np.int32, count)
        self.sizes = _sums(self._segment_lengths, self._segment_counts)
        """The number of tokens of each sequence."""

    def __len__(self) -> int:
        return len(self._tracks)

    def __iter__(self) -> Iterator[Track]:
        parts = iter(self._parts)
        for track in self._tracks:
            yield [
                EncodedSegment(
                    list(islice(parts, len(segment.parts))),
                    segment.is_completion,
                    segment.first_label,
                )
                for segment in track
            ]

    def __getitem__(self, index: int) -> Track:
        return next(islice(self, index, None))

    @cached_property
    def whole(self) -> Sequences:
        """All sequences, concatenated."""
        return self._concatenate(np.ones(len(self), bool))

    def concatenate(self, chosen: Array) -> Sequences:
        """Concatenate the chosen sequences (a bool for each)."""
        return self.whole if chosen.all() else self._concatenate(chosen)

    def _concatenate(self, chosen: Array) -> Sequences:
        chosen_segments = np.repeat(chosen, self._segment_counts)
        parts = compress(self._parts, np.repeat(chosen_segments, self._part_counts))
        segment_lengths = self._segment_lengths[chosen_segments]
        first_labels = self._first_labels[chosen_segments]
        has_label = (first_labels != _NO_LABEL) & (segment_lengths > 0)
        return Sequences(
            ids=np.concatenate([*parts, _EMPTY], dtype=self.dtype, casting="unsafe"),
            lengths=self.sizes[chosen],
            segment_lengths=segment_lengths.astype(np.int32),
            is_trained=self._is_completion[chosen_segments],
            override_positions=(np.cumsum(segment_lengths) - segment_lengths)[has_label],
            label_overrides=first_labels[has_label],
        )

    @staticmethod
    def of(tracks: Sequence[Track], dtype: np.dtype[Any] = _EMPTY.dtype) -> Batch:
        """Build a batch from encoded tracks."""
        parts = [part for track in tracks for segment in track for part in segment.parts]
        return Batch(tracks, parts, dtype)


def build(track: Track) -> Sequences:
    """Concatenate and label the segments of one sequence."""
    return Batch.of([track]).whole


def _sums(values: Array, counts: Array) -> Array:
    """Sum consecutive groups of values; `counts` are the sizes of the groups."""
    upto = np.concatenate(([0], np.cumsum(values)))
    ends = np.cumsum(counts)
    sums: Array = upto[ends] - upto[ends - counts]
    return sums


class SampleEncoder:
    """Encodes the texts of many sequences at once, with a cache: most texts of a template recur."""

    def __init__(self, encoder: TextEncoder, final_id: int | None = None) -> None:
        self._encoder = encoder
        facts = encoder.facts
        self._final = [] if final_id is None else [Segment([final_id], True)]
        self._strips_before = set(facts.strip_before)
        self._strips_after = set(facts.strip_after)
        self._dtype = smallest_dtype(facts.size)
        self._cache: dict[Key, Array] = {}

    def encode(self, tracks: Sequence[Sequence[Segment]]) -> Batch:
        """Encode every track; the order is kept."""
        if self._strips_before or self._strips_after:
            tracks = [self._strip(track) for track in tracks]
        if self._final:
            tracks = [[*track, *self._final] for track in tracks]
        return Batch(tracks, self._lookup(self._keys(tracks)), self._dtype)

    def _keys(self, tracks: Sequence[Sequence[Segment]]) -> list[Key]:
        """Return the cache key of each part."""
        if not self._encoder.facts.has_prefix:
            return [part for track in tracks for segment in track for part in segment.parts]
        keys: list[Key] = []
        for track in tracks:
            before: Part | None = None
            for part in chain.from_iterable(segment.parts for segment in track):
                is_continued = isinstance(part, str) and self._is_continued(before)
                keys.append((part,) if is_continued else part)  # type: ignore[arg-type]
                before = part
        return keys

    def _is_continued(self, before: Part | None) -> bool:
        """Return whether a text continues another for a tokenizer that marks beginnings."""
        if before is None:
            return False
        return isinstance(before, str) or not self._encoder.facts.prefixes_sections

    def _lookup(self, keys: list[Key]) -> list[Array]:
        cache = self._cache
        missing = set(keys).difference(cache)
        cache.update((key, np.array([key], np.uint32)) for key in missing if isinstance(key, int))
        texts = [key for key in missing if isinstance(key, str)]
        cache.update(zip(texts, self._encoder.encode(texts)))
        continued = [key for key in missing if isinstance(key, tuple)]
        encoded = self._encoder.encode([key[0] for key in continued], continued=True)
        cache.update(zip(continued, encoded))
        found = list(map(cache.__getitem__, keys))
        is_full = len(cache) > CACHED_TEXTS
        evicted: list[Key] = [text for text in texts if is_full or len(text) > MAX_CACHED_CHARS]
        evicted += [key for key in continued if is_full or len(key[0]) > MAX_CACHED_CHARS]
        for key in evicted:
            del cache[key]
        return found

    def _strip(self, track: Sequence[Segment]) -> list[Segment]:
        """Remove the white space that some special tokens strip."""
        flat = [part for segment in track for part in segment.parts]
        stripped: list[Part] = []
        for index, part in enumerate(flat):
            if isinstance(part, str):
                if index and flat[index - 1] in self._strips_after:
                    part = part.lstrip()
                if index + 1 < len(flat) and flat[index + 1] in self._strips_before:
                    part = part.rstrip()
            stripped.append(part)
        rest = iter(stripped)
        segments = []
        for segment in track:
            parts = [next(rest) for _ in segment.parts]
            segments.append(segment._replace(parts=[part for part in parts if part != ""]))
        return segments


def truncate(track: Track, limit: int) -> Track:
    """Truncate a sequence to `limit` tokens: turn by turn, the longer of prompt and completion.

    A prompt loses the end of its longest text, so that what the template puts around it stays.
    """
    kept: Track = []
    used = 0
    for prompt, completion in _split_turns(track):
        budget = limit - used
        prompt_size, completion_size = (sum(s.size for s in side) for side in (prompt, completion))
        if budget < min(prompt_size, 1) + min(completion_size, 1):
            break
        if prompt_size + completion_size > budget:
            for_prompt, for_completion = _split_budget(prompt_size, completion_size, budget)
            kept += _truncate_longest_part(prompt, prompt_size - for_prompt)
            kept += _truncate_end(completion, for_completion)
            break
        kept += [*prompt, *completion]
        used += prompt_size + completion_size
    return kept


def truncate_pair(tracks: Sequence[Track], limit: int) -> list[Track]:
    """Truncate the sequences of a pair to `limit` tokens each; both keep the same prompt."""
    turns = [next(_split_turns(track)) for track in tracks]
    sizes = [[sum(s.size for s in side) for side in turn] for turn in turns]
    # The longer completion leaves less to the prompt.
    kept = min(
        _split_budget(prompt, completion, limit)[0] if prompt + completion > limit else prompt
        for prompt, completion in sizes
    )
    cut = []
    for track, (prompt, _), (prompt_size, _) in zip(tracks, turns, sizes):
        rest = _truncate_end(track[len(prompt) :], limit - kept)
        cut.append([*_truncate_longest_part(prompt, prompt_size - kept), *rest])
    return cut


def _split_turns(track: Track) -> Iterator[tuple[Track, Track]]:
    prompt: Track = []
    completion: Track = []
    for segment in track:
        if completion and not segment.is_completion:
            yield prompt, completion
            prompt, completion = [], []
        (completion if segment.is_completion else prompt).append(segment)
    yield prompt, completion


def _split_budget(prompt_size: int, completion_size: int, budget: int) -> tuple[int, int]:
    """Split the tokens of a turn: a short side stays whole, else both shrink alike."""
    if not completion_size or not prompt_size:
        return (budget, 0) if not completion_size else (0, budget)
    if 2 * completion_size < budget:
        return budget - completion_size, completion_size
    if 2 * prompt_size < budget:
        return prompt_size, budget - prompt_size
    for_completion = max(1, budget * completion_size // (prompt_size + completion_size))
    return budget - for_completion, for_completion


def _truncate_longest_part(prompt: Track, surplus: int) -> Track:
    segments = [segment._replace(parts=list(segment.parts)) for segment in prompt]
    while surplus > 0:
        sizes = [
            (len(part), i, j) for i, s in enumerate(segments) for j, part in enumerate(s.parts)
        ]
        size, i, j = max(sizes)
        taken = min(surplus, size)
        segments[i].parts[j] = segments[i].parts[j][: size - taken]
        surplus -= taken
    return segments


def _truncate_end(completion: Track, budget: int) -> Track:
    segments: Track = []
    for segment in completion:
        parts = []
        for part in segment.parts:
            parts.append(part[:budget])
            budget -= len(parts[-1])
        segments.append(segment._replace(parts=parts))
    return segments


def end_of_answer(chat: ChatFormat, encoder: TextEncoder) -> list[int]:
    """Return what a format puts behind the text of the last answer, from a special token on."""
    try:
        track = chat.render(Conversation((Message("user", "a"), Message("assistant", PROBE))))
    except (MalformedRecord, UnusableRecord):  # a template may want more than that
        return []
    parts = [part for segment in track for part in segment.parts]
    text = [index for index, part in enumerate(parts) if isinstance(part, str) and PROBE in part]
    special = {part for part in parts if isinstance(part, int)}
    count = sum(isinstance(part, int) for part in parts[text[-1] :]) if text else 0
    ids: list[int] = build(SampleEncoder(encoder).encode([track])[0]).ids.tolist()
    places = [index for index, token in enumerate(ids) if token in special]
    return ids[places[-count] :] if count else []


class PromptEncoder:
    """Encodes a conversation up to its next completion, as in training.

    `prompt_type` is what preprocessing was given: a template's name or `tokenizer`. Special tokens
    in the messages are text, except with `empty`, where they are the template.
    """

    def __init__(
        self,
        facts: TokenizerFacts,
        prompt_type: str,
        *,
        prompt_type_path: str = "",
        thinking: Thinking = "none",
    ) -> None:
        parse = prompt_type == "empty"
        is_own = prompt_type == "tokenizer"
        template = None if is_own else load_template(prompt_type, prompt_type_path)
        self._chat = make_chat_format(facts, template, parse_special=parse, thinking=thinking)
        # One prompt at a time needs no accelerator, and it takes a moment to load.
        self._encoder = SampleEncoder(TextEncoder(facts, parse_special=parse, accelerate=False))
        self.stop_ids = self._chat.stop_ids

    def encode(self, messages: Sequence[Message], system: str = "") -> list[int]:
        """Return the token ids of the prompt for the next completion."""
        conversation = Conversation(tuple(messages), system).check(answered=False)
        sample = build(self._encoder.encode([self._chat.render(conversation)])[0])
        ids: list[int] = sample.ids.tolist()
        return ids
