"""Records to conversations in which images and videos have their places."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.data.chat import Piece
from mindspeed_llm.data.conversation import Conversation, MalformedRecord, Message
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.handlers.alpaca import AlpacaStyleInstructionHandler
from mindspeed_llm.data.handlers.base import Columns, Context, Handler
from mindspeed_llm.data.handlers.messages import (
    OpenAIInstructionHandler,
    SharegptStyleInstructionHandler,
)
from mindspeed_mm.data.media import Kind, Medium
from mindspeed_mm.data.options import AttrOptions

MARKS: dict[str, Kind] = {"<image>": "image", "<video>": "video"}
MARK = re.compile("<image>|<video>")
PARTS: dict[str, Kind] = {"image": "image", "image_url": "image"}
PARTS |= {"video": "video", "video_url": "video"}
SIGNS: dict[str, Kind] = {"\U0010fff2": "image", "\U0010fff3": "video"}
"""Stand for media while a template runs: private-use characters that no template touches."""
SIGN = re.compile("([\U0010fff2\U0010fff3])")
SIGN_OF = {kind: sign for sign, kind in SIGNS.items()}
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns that data holds media in: one that is filled and not read would be lost in silence."""
AUDIO = ("audio", "audio_url", "input_audio")
NEVER = "\0"
"""A tag that no message has."""


@dataclass(frozen=True)
class Request:
    """A record that was read: its conversation and its media in the order of their places."""

    conversation: Conversation
    media: tuple[Medium, ...]


class _Keep:
    """Takes the place of a chat format in a handler: keeps the conversation instead of writing."""

    title = ""
    eos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    teaches_eos = False
    conversation: Conversation

    def render(self, conversation: Conversation) -> list[Piece]:
        self.conversation = conversation
        return []


class RecordReader:
    """Reads records of one layout."""

    def __init__(self, attr: AttrOptions, encoder: TextEncoder, media_root: str | None) -> None:
        self._attr = attr
        self._root = Path(media_root) if media_root is not None else None
        self._kept = _Keep()
        handler, columns = _handler(attr)
        self._handler: Handler = handler(Context(columns, encoder, self._kept))
        named = (column for _, column in self._columns())
        self._read = {name for name in (*columns.names.values(), *named) if name}

    def read(self, record: Mapping[str, Any], folder: Path) -> Request:
        """Read a record whose file is in `folder`; say what is wrong with it, if something is."""
        _check_read(record, self._read)
        lists = {kind: _as_list(record.get(column or "")) for kind, column in self._columns()}
        if self._attr.formatting == "openai":
            record = _with_marks(record, self._attr.messages or "messages", lists)
        try:
            self._handler.render(record)
        except MalformedRecord as error:
            raise MalformedRecord(str(error).replace("--map-keys tags", "attr")) from None
        conversation = _signed(self._kept.conversation)
        order = [SIGNS[sign] for sign in SIGN.findall(_said(conversation))]
        for kind in SIGN_OF:
            _check_count(kind, order.count(kind), len(lists[kind]))
        for answer in conversation.messages[1::2]:
            if SIGN.search(answer.content):
                raise MalformedRecord("an answer holds <image> or <video>")
        left = {kind: iter(found) for kind, found in lists.items()}
        root = folder if self._root is None else self._root
        media = tuple(Medium(kind, next(left[kind]), root).check() for kind in order)
        return Request(conversation, media)

    def _columns(self) -> list[tuple[Kind, str | None]]:
        return [("image", self._attr.images), ("video", self._attr.videos)]


def _handler(attr: AttrOptions) -> tuple[type[Handler], Columns]:
    system, tools = attr.system or "", attr.tools or ""
    if attr.formatting == "openai":
        names = {"messages": attr.messages or "messages", "tools": tools}
        return OpenAIInstructionHandler, Columns(names, {})
    if attr.formatting == "alpaca":
        names = {"prompt": attr.prompt, "query": attr.query or "", "response": attr.response}
        names |= {"history": attr.history or "", "system": system}
        return AlpacaStyleInstructionHandler, Columns(names, {})
    names = {"messages": attr.messages or "conversations", "system": system, "tools": tools}
    tags = {tag: getattr(attr, tag) or NEVER for tag in SharegptStyleInstructionHandler.tags}
    return SharegptStyleInstructionHandler, Columns(names, tags)


def _as_list(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list) else [value]


def _check_read(record: Mapping[str, Any], read: Collection[str]) -> None:
    """Refuse a record with media in a column that is not read."""
    for column in MEDIA:
        if column not in read and any(_as_list(record.get(column))):
            known = ", ".join(sorted(set(MEDIA) & set(read))) or "none"
            raise MalformedRecord(
                f"has {column}, which is not read (columns of media that are: {known}): name it "
                "in attr as images or videos, or remove it; there is no audio"
            )


def _with_marks(
    record: Mapping[str, Any], column: str, lists: dict[Kind, list[Any]]
) -> dict[str, Any]:
    """Write the parts of OpenAI's messages that are media as marks, and collect what they name."""
    entries = record.get(column)
    if not isinstance(entries, list):
        return dict(record)
    named: dict[Kind, list[Any]] = {kind: [] for kind in lists}
    marked = [_with_mark(entry, named) for entry in entries]
    for kind, sources in named.items():
        if sources and lists[kind]:
            raise MalformedRecord(f"names {kind}s in its messages and in a column: use one of them")
        lists[kind] += sources
    return {**record, column: marked}


def _with_mark(entry: Any, named: dict[Kind, list[Any]]) -> Any:
    content = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(content, list):
        return entry
    parts = []
    for part in content:
        kind = _kind(part)
        if kind is not None:
            keys = (kind, f"{kind}_url", "url", "path")
            source = next((part[key] for key in keys if part.get(key) is not None), None)
            if source is not None:  # one without takes the next of the column
                named[kind].append(source.get("url") if isinstance(source, dict) else source)
            part = {"type": "text", "text": f"<{kind}>"}
        parts.append(part)
    return {**entry, "content": parts}


def _kind(part: Any) -> Kind | None:
    name = part.get("type") if isinstance(part, dict) else None
    if name in AUDIO:
        raise MalformedRecord(f"a message holds {name}: only text, images and videos are read")
    return PARTS.get(name) if isinstance(name, str) else None


def _signed(conversation: Conversation) -> Conversation:
    """Put a sign in the place of every mark."""

    def sign(text: str) -> str:
        return MARK.sub(lambda match: SIGN_OF[MARKS[match[0]]], SIGN.sub("", text))

    def signed(message: Message) -> Message:
        before = tuple(map(signed, message.before))
        return message._replace(content=sign(message.content), before=before)

    messages = tuple(map(signed, conversation.messages))
    return Conversation(messages, sign(conversation.system), conversation.tools)


def _said(conversation: Conversation) -> str:
    every = [one for message in conversation.messages for one in (*message.before, message)]
    return conversation.system + "".join(message.content for message in every)


def _check_count(kind: Kind, marks: int, media: int) -> None:
    if marks != media:
        raise MalformedRecord(f"has {marks} <{kind}> for {media} {kind}s: they must be as many")
