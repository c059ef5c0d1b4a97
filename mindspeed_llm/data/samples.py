"""Rendered conversations to token ids and labels, a block of records at a time."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import cached_property
from itertools import chain, compress, islice
from typing import Any, Literal, NamedTuple

import numpy as np

from mindspeed_llm.data.chat import Part, Piece, Thinking
from mindspeed_llm.data.chat_jinja import make_chat_format
from mindspeed_llm.data.conversation import Conversation, Message
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.indexed import IGNORED, Array, smallest_dtype
from mindspeed_llm.data.template import load_template
from mindspeed_llm.data.tokenizer import TokenizerFacts

REMEMBERED, SHORT = 20_000, 256
"""How many texts of up to how many characters are remembered: headers and system prompts recur."""
_NO_LABEL = -1
"""Stands for the first label that a piece does not have."""
_NOTHING: Array = np.zeros(0, np.int32)
Key = str | int | tuple[str]
"""What has ids: a text, a special token or, in a tuple, a text that goes on where another ended."""


def learns_to_end(labels: Array, ends: Container[int | None]) -> bool:
    """Say whether the last token that is trained is one of those at which a model stops.

    A chat template may put more behind it, such as a line break, which is not trained.
    """
    learnt = labels[labels != IGNORED]
    return len(learnt) > 0 and int(learnt[-1]) in ends


class EncodedPiece(NamedTuple):
    """A piece as ids, one array per part."""

    parts: list[Array]
    is_answer: bool
    first_label: int | None

    @property
    def size(self) -> int:
        """The number of tokens."""
        return sum(map(len, self.parts))


Track = list[EncodedPiece]


class Sequences(NamedTuple):
    """Sequences one behind the other, in the form in which they travel between processes.

    Labels are the ids once more but for what is not trained, so they are made on arrival.
    """

    ids: Array
    lengths: Array
    borders: Array | None = None
    """Of documents: how many sequences there are up to the end of each."""
    stretches: Array = _NOTHING
    """Of samples: the lengths of stretches that are trained as a whole or not at all."""
    is_learnt: Array = _NOTHING
    """Which of the stretches are."""
    places: Array = _NOTHING
    """Tokens whose label is another one."""
    other_labels: Array = _NOTHING

    @property
    def labels(self) -> Array:
        """What is to be trained in each place, or IGNORED."""
        labels = np.full(len(self.ids), IGNORED, np.int32)
        learnt = np.repeat(self.is_learnt, self.stretches)
        np.copyto(labels, self.ids, casting="unsafe", where=learnt)
        labels[self.places] = self.other_labels
        return labels

    def column(self, content: Literal["ids", "labels", "ones"]) -> Array:
        """Return what one file takes of the sequences."""
        if content == "ones":
            return np.ones(len(self.ids), np.int32)
        return self.labels if content == "labels" else self.ids

    def count_learnt(self) -> tuple[Array, Array]:
        """Return how many tokens of each sequence are trained, and the last of them or IGNORED."""
        labels = self.labels
        places = np.flatnonzero(labels != IGNORED)
        upto = np.searchsorted(places, np.cumsum(self.lengths))
        counts = np.diff(upto, prepend=0)
        return counts, np.append(labels[places], IGNORED)[np.where(counts > 0, upto - 1, -1)]


class Batch:
    """Many sequences: which parts make a piece, and which pieces a sequence."""

    def __init__(
        self,
        tracks: Sequence[Sequence[Piece | EncodedPiece]],
        parts: list[Array],
        dtype: np.dtype[Any] = _NOTHING.dtype,
    ) -> None:
        """Take the pieces of each sequence, and the ids of all their parts in order."""
        pieces: list[Piece | EncodedPiece] = list(chain.from_iterable(tracks))
        count = len(pieces)
        self._tracks, self._parts, self.dtype = tracks, parts, dtype
        self._pieces = np.fromiter(map(len, tracks), np.int64, len(tracks))
        self._counts = np.fromiter([len(piece.parts) for piece in pieces], np.int64, count)
        self._stretches = _sums(np.fromiter(map(len, parts), np.int64, len(parts)), self._counts)
        self._is_answer = np.fromiter([piece.is_answer for piece in pieces], np.bool_, count)
        labels = [_NO_LABEL if p.first_label is None else p.first_label for p in pieces]
        self._first_labels = np.fromiter(labels, np.int32, count)
        self.sizes = _sums(self._stretches, self._pieces)
        """The number of tokens of each sequence."""

    def __len__(self) -> int:
        return len(self._tracks)

    def __iter__(self) -> Iterator[Track]:
        parts = iter(self._parts)
        for track in self._tracks:
            yield [
                EncodedPiece(
                    list(islice(parts, len(piece.parts))), piece.is_answer, piece.first_label
                )
                for piece in track
            ]

    def __getitem__(self, place: int) -> Track:
        return next(islice(self, place, None))

    @cached_property
    def whole(self) -> Sequences:
        """All sequences, one behind the other."""
        return self._join(np.ones(len(self), bool))

    def join(self, chosen: Array) -> Sequences:
        """Put the chosen sequences (a bool for each) one behind the other."""
        return self.whole if chosen.all() else self._join(chosen)

    def _join(self, chosen: Array) -> Sequences:
        of_pieces = np.repeat(chosen, self._pieces)
        parts = compress(self._parts, np.repeat(of_pieces, self._counts))
        stretches, first_labels = self._stretches[of_pieces], self._first_labels[of_pieces]
        has_label = (first_labels != _NO_LABEL) & (stretches > 0)
        return Sequences(
            ids=np.concatenate([*parts, _NOTHING], dtype=self.dtype, casting="unsafe"),
            lengths=self.sizes[chosen],
            stretches=stretches.astype(np.int32),
            is_learnt=self._is_answer[of_pieces],
            places=(np.cumsum(stretches) - stretches)[has_label],
            other_labels=first_labels[has_label],
        )

    @staticmethod
    def of(tracks: Sequence[Track], dtype: np.dtype[Any] = _NOTHING.dtype) -> Batch:
        """Take tracks that are encoded already."""
        parts = [part for track in tracks for piece in track for part in piece.parts]
        return Batch(tracks, parts, dtype)


def build(track: Track) -> Sequences:
    """Join the pieces of one sequence and label them."""
    return Batch.of([track]).whole


def _sums(values: Array, counts: Array) -> Array:
    """Add up neighbours: as many at a time as each of `counts` says."""
    upto = np.concatenate(([0], np.cumsum(values)))
    ends = np.cumsum(counts)
    sums: Array = upto[ends] - upto[ends - counts]
    return sums


class Assembler:
    """Encodes the texts of many sequences together, since most texts of a template recur."""

    def __init__(self, encoder: TextEncoder, final: int | None = None) -> None:
        self._encoder = encoder
        facts = encoder.facts
        self._final = [] if final is None else [Piece([final], True)]
        self._before, self._after = set(facts.strip_before), set(facts.strip_after)
        self._dtype = smallest_dtype(facts.size)
        self._known: dict[Key, Array] = {}

    def encode(self, tracks: Sequence[Sequence[Piece]]) -> Batch:
        """Turn the text of every track into ids; the order stays."""
        if self._before or self._after:
            tracks = [self._strip(track) for track in tracks]
        if self._final:
            tracks = [[*track, *self._final] for track in tracks]
        return Batch(tracks, self._look_up(self._keys(tracks)), self._dtype)

    def _keys(self, tracks: Sequence[Sequence[Piece]]) -> list[Key]:
        """Return what to look up for each part."""
        if not self._encoder.facts.has_prefix:
            return [part for track in tracks for piece in track for part in piece.parts]
        keys: list[Key] = []
        for track in tracks:
            before: Part | None = None
            for part in chain.from_iterable(piece.parts for piece in track):
                goes_on = isinstance(part, str) and self._goes_on(before)
                keys.append((part,) if goes_on else part)  # type: ignore[arg-type]
                before = part
        return keys

    def _goes_on(self, before: Part | None) -> bool:
        """Tell whether a text is the middle of a text for a tokenizer that marks beginnings."""
        if before is None:
            return False
        return isinstance(before, str) or not self._encoder.facts.prefixes_sections

    def _look_up(self, keys: list[Key]) -> list[Array]:
        known = self._known
        fresh = set(keys).difference(known)
        known.update((key, np.array([key], np.uint32)) for key in fresh if isinstance(key, int))
        texts = [key for key in fresh if isinstance(key, str)]
        known.update(zip(texts, self._encoder.encode(texts)))
        later = [key for key in fresh if isinstance(key, tuple)]
        known.update(zip(later, self._encoder.encode([key[0] for key in later], continued=True)))
        found = list(map(known.__getitem__, keys))
        is_full = len(known) > REMEMBERED
        forgotten: list[Key] = [text for text in texts if is_full or len(text) > SHORT]
        forgotten += [key for key in later if is_full or len(key[0]) > SHORT]
        for key in forgotten:
            del known[key]
        return found

    def _strip(self, track: Sequence[Piece]) -> list[Piece]:
        """Take away the space that some special tokens swallow."""
        flat = [part for piece in track for part in piece.parts]
        stripped: list[Part] = []
        for place, part in enumerate(flat):
            if isinstance(part, str):
                if place and flat[place - 1] in self._after:
                    part = part.lstrip()
                if place + 1 < len(flat) and flat[place + 1] in self._before:
                    part = part.rstrip()
            stripped.append(part)
        rest = iter(stripped)
        pieces = []
        for piece in track:
            parts = [next(rest) for _ in piece.parts]
            pieces.append(piece._replace(parts=[part for part in parts if part != ""]))
        return pieces


def shorten(track: Track, limit: int) -> Track:
    """Cut a sequence to `limit` tokens: turn by turn, the shorter of question and answer first.

    Of a question the end of its longest text goes, so that what the template puts around it stays.
    """
    kept: Track = []
    used = 0
    for prompt, answer in _turns(track):
        room = limit - used
        asked, answered = sum(p.size for p in prompt), sum(p.size for p in answer)
        if room < min(asked, 1) + min(answered, 1):
            break
        if asked + answered > room:
            asked_room, answer_room = _share(asked, answered, room)
            kept += [*_cut_longest(prompt, asked - asked_room), *_cut_end(answer, answer_room)]
            break
        kept += [*prompt, *answer]
        used += asked + answered
    return kept


def _turns(track: Track) -> Iterator[tuple[Track, Track]]:
    prompt: Track = []
    answer: Track = []
    for piece in track:
        if answer and not piece.is_answer:
            yield prompt, answer
            prompt, answer = [], []
        (answer if piece.is_answer else prompt).append(piece)
    yield prompt, answer


def _share(asked: int, answered: int, room: int) -> tuple[int, int]:
    """Share the room of a turn: a short side stays whole, else both shrink alike."""
    if not answered or not asked:
        return (room, 0) if not answered else (0, room)
    if 2 * answered < room:
        return room - answered, answered
    if 2 * asked < room:
        return asked, room - asked
    answer_room = max(1, room * answered // (asked + answered))
    return room - answer_room, answer_room


def _cut_longest(prompt: Track, surplus: int) -> Track:
    pieces = [piece._replace(parts=list(piece.parts)) for piece in prompt]
    while surplus > 0:
        places = [(len(part), i, j) for i, p in enumerate(pieces) for j, part in enumerate(p.parts)]
        size, i, j = max(places)
        taken = min(surplus, size)
        pieces[i].parts[j] = pieces[i].parts[j][: size - taken]
        surplus -= taken
    return pieces


def _cut_end(answer: Track, room: int) -> Track:
    pieces: Track = []
    for piece in answer:
        parts = []
        for part in piece.parts:
            parts.append(part[:room])
            room -= len(parts[-1])
        pieces.append(piece._replace(parts=parts))
    return pieces


class PromptEncoder:
    """Encodes a conversation that waits for an answer.

    `prompt_type` is what preprocessing was given: a template's name or `tokenizer`. Special tokens
    in what people type are text, except with `empty`, where they are the template.
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
        self._assembler = Assembler(TextEncoder(facts, parse_special=parse, accelerate=False))
        self.stop_ids = self._chat.stop_ids

    def encode(self, messages: Sequence[Message], system: str = "") -> list[int]:
        """Return the ids of everything up to where the model is to answer."""
        conversation = Conversation(tuple(messages), system).check(answered=False)
        sample = build(self._assembler.encode([self._chat.render(conversation)])[0])
        ids: list[int] = sample.ids.tolist()
        return ids
