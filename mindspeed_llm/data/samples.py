"""Pieces of text and special tokens to ids and labels, a block of records at a time."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mindspeed_llm.data.chat import Piece
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.indexed import Array
from mindspeed_llm.data.template import Part

IGNORED = -100
"""The label of what is not learnt."""


_NOTHING: Array = np.zeros(0, np.int32)


class Sample(NamedTuple):
    """One sequence; a label is the id in its place, or IGNORED."""

    ids: Array
    labels: Array


def learns_to_end(labels: Array, ends: Container[int | None]) -> bool:
    """Say whether the last token that is learnt is one of those at which a model stops.

    A chat template may put more behind it, such as a line break, which is not learnt.
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


class Assembler:
    """Encodes the texts of many sequences together, since tokenizers are fast in bulk only."""

    def __init__(self, encoder: TextEncoder, final: int | None = None) -> None:
        self._encoder = encoder
        self._final = final
        facts = encoder.facts
        self._before, self._after = set(facts.strip_before), set(facts.strip_after)
        self._tokens: dict[int, Array] = {}

    def encode(self, tracks: Sequence[Sequence[Piece]]) -> list[Track]:
        """Turn the text of every track into ids; the order stays."""
        texts: list[tuple[str, bool]] = []
        plans = [list(self._plan(track, texts)) for track in tracks]
        ids = iter(self._encode(texts))
        return [
            [
                EncodedPiece(
                    [next(ids) if part is None else part for part in parts], is_answer, label
                )
                for parts, is_answer, label in plan
            ]
            for plan in plans
        ]

    def _plan(
        self, track: Sequence[Piece], texts: list[tuple[str, bool]]
    ) -> Iterator[tuple[list[Array | None], bool, int | None]]:
        """Yield the parts of each piece with None for a text, which joins `texts`."""
        pieces = self._strip(track) if self._before or self._after else track
        before: Part | None = None
        for piece in pieces:
            parts: list[Array | None] = []
            for part in piece.parts:
                if isinstance(part, str):
                    texts.append((part, self._goes_on(before)))
                    parts.append(None)
                else:
                    parts.append(self._token(part))
                before = part
            yield parts, piece.is_answer, piece.first_label
        if self._final is not None:
            yield [self._token(self._final)], True, None

    def _goes_on(self, before: Part | None) -> bool:
        """Tell whether a text is the middle of a text for a tokenizer that marks beginnings."""
        if before is None or not self._encoder.has_prefix:
            return False
        return isinstance(before, str) or not self._encoder.prefix_after_token

    def _encode(self, texts: list[tuple[str, bool]]) -> Iterator[Array]:
        first = iter(self._encoder.encode([text for text, goes_on in texts if not goes_on]))
        later = iter(self._encoder.encode([text for text, goes_on in texts if goes_on], True))
        return (next(later if goes_on else first) for _, goes_on in texts)

    def _token(self, number: int) -> Array:
        if number not in self._tokens:
            self._tokens[number] = np.array([number], np.int32)
        return self._tokens[number]

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


def build(track: Track) -> Sample:
    """Join the pieces of a sequence and label them."""
    ids = np.concatenate([part for piece in track for part in piece.parts] or [_NOTHING])
    labels = np.full(len(ids), IGNORED, np.int32)
    place = 0
    for piece in track:
        end = place + piece.size
        if piece.is_answer:
            labels[place:end] = ids[place:end]
        if piece.first_label is not None and end > place:
            labels[place] = piece.first_label
        place = end
    return Sample(ids, labels)


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
