"""Samples that are too long, cut where it hurts least."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_llm.data.samples import Track


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
