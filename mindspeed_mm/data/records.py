"""Read records from files, and parse them into conversations with media placeholders."""

from __future__ import annotations

import base64
import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from mindspeed.config import ConfigError
from mindspeed_llm.data.chat import Segment
from mindspeed_llm.data.conversation import Conversation, MalformedRecord, Message
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.handlers.alpaca import AlpacaStyleInstructionHandler
from mindspeed_llm.data.handlers.base import Columns, Context, Handler
from mindspeed_llm.data.handlers.messages import (
    OpenAIInstructionHandler,
    SharegptStyleInstructionHandler,
)
from mindspeed_llm.data.readers import Problem, Source, blocks, find_sources, read
from mindspeed_llm.data.summary import record_location
from mindspeed_mm.data.media import MediaItem, Modality
from mindspeed_mm.data.options import AttrOptions

PLACEHOLDERS: dict[str, Modality] = {"<image>": "image", "<video>": "video"}
PLACEHOLDER = re.compile("<image>|<video>")
PARTS: dict[str, Modality] = {"image": "image", "image_url": "image"}
PARTS |= {"video": "video", "video_url": "video"}
SENTINELS: dict[str, Modality] = {"\U0010fff2": "image", "\U0010fff3": "video"}
"""Stand for media while a chat template runs: private-use characters that it passes through."""
SENTINEL = re.compile("([\U0010fff2\U0010fff3])")
SENTINEL_OF = {modality: sentinel for sentinel, modality in SENTINELS.items()}
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
"""Usual names of media columns: one that is filled but not configured would be lost silently."""
AUDIO = ("audio", "audio_url", "input_audio")
UNUSED_TAG = "\0"
"""A tag that no message has."""


class Records:
    """Records by index, held as compact JSON: a million of them cost no Python objects."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array("q", [0])
        self._lines = array("q")
        self._files = array("l")
        self._paths: list[str] = []

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = orjson.loads(self._bytes[self._ends[index] : self._ends[index + 1]])
        if isinstance(found, str):  # why the line is not a record
            raise MalformedRecord(found)
        return dict(found)

    def where(self, index: int) -> str:
        """Return the file of a record, and its line or its index in a JSON array."""
        return record_location(self._paths[self._files[index]], self._lines[index])

    def folder(self, index: int) -> Path:
        """Return the folder of the file that holds a record."""
        return Path(self._paths[self._files[index]]).parent

    def add(self, source: Source, limit: int | None = None) -> None:
        """Read a file, or its first `limit` records."""
        self._paths.append(source.path)
        line, count = 0, 0
        for block in blocks([source]):
            rows, size = read(block)
            for number, record in rows:
                if count == limit:
                    return
                self._append(record, line + number)
                count += 1
            line += size

    def _append(self, record: dict[str, Any] | Problem, line: int) -> None:
        value = record.reason if isinstance(record, Problem) else record
        self._bytes += orjson.dumps(value, default=_as_data_url)
        self._ends.append(len(self._bytes))
        self._lines.append(line)
        self._files.append(len(self._paths) - 1)


def _as_data_url(value: Any) -> str:
    """Encode the bytes of an image, as in parquet files, as a data: URL."""
    if isinstance(value, bytes):
        return "data:;base64," + base64.b64encode(value).decode()
    raise TypeError


def read_records(paths: Sequence[str], folder: str | None, limit: int | None) -> Records:
    """Read the files of `dataset`: paths relative to the working directory or to `folder`."""
    records = Records()
    for name in filter(None, map(str.strip, paths)):
        path = Path(name)
        if not path.exists() and folder and (Path(folder) / path).exists():
            path = Path(folder) / path
        try:
            for source in find_sources(str(path)):
                records.add(source, limit)
        except ConfigError as error:
            raise ConfigError(str(error).replace("--input", "dataset", 1)) from None
    if not len(records):
        raise ConfigError(
            f"dataset {','.join(paths) or '(nothing)'} contains no records: name a file"
        )
    return records


@dataclass(frozen=True)
class ParsedRecord:
    """The conversation of a record, and its media in the order of their placeholders."""

    conversation: Conversation
    media: tuple[MediaItem, ...]


class _CaptureFormat:
    """A chat format that keeps the conversation of a handler instead of rendering it."""

    title = ""
    eos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    trains_eos = False
    conversation: Conversation

    def render(self, conversation: Conversation) -> list[Segment]:
        self.conversation = conversation
        return []


class RecordParser:
    """Parses records of one layout."""

    def __init__(self, attr: AttrOptions, encoder: TextEncoder, media_root: str | None) -> None:
        self._attr = attr
        self._root = Path(media_root) if media_root is not None else None
        self._capture = _CaptureFormat()
        handler, columns = _handler(attr)
        self._handler: Handler = handler(Context(columns, encoder, self._capture))
        named = (column for _, column in self._columns())
        self._read = {name for name in (*columns.names.values(), *named) if name}

    def parse(self, record: Mapping[str, Any], folder: Path) -> ParsedRecord:
        """Parse a record whose file is in `folder`; MalformedRecord says what is wrong with it."""
        _check_columns(record, self._read)
        lists = {
            modality: _as_list(record.get(column or "")) for modality, column in self._columns()
        }
        if self._attr.formatting == "openai":
            record = _with_placeholders(record, self._attr.messages or "messages", lists)
        try:
            self._handler.render(record)
        except MalformedRecord as error:
            raise MalformedRecord(str(error).replace("--map-keys tags", "attr")) from None
        conversation = _with_sentinels(self._capture.conversation)
        order = [SENTINELS[found] for found in SENTINEL.findall(_full_text(conversation))]
        for modality in SENTINEL_OF:
            _check_count(modality, order.count(modality), len(lists[modality]))
        for answer in conversation.messages[1::2]:
            if SENTINEL.search(answer.content):
                raise MalformedRecord("an answer contains <image> or <video>")
        remaining = {modality: iter(found) for modality, found in lists.items()}
        root = folder if self._root is None else self._root
        media = tuple(
            MediaItem(modality, next(remaining[modality]), root).check() for modality in order
        )
        return ParsedRecord(conversation, media)

    def _columns(self) -> list[tuple[Modality, str | None]]:
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
    tags = {tag: getattr(attr, tag) or UNUSED_TAG for tag in SharegptStyleInstructionHandler.tags}
    return SharegptStyleInstructionHandler, Columns(names, tags)


def _as_list(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list) else [value]


def _check_columns(record: Mapping[str, Any], read: Collection[str]) -> None:
    """Reject a record with media in a column that is not configured."""
    for column in MEDIA_COLUMNS:
        if column not in read and any(_as_list(record.get(column))):
            known = ", ".join(sorted(set(MEDIA_COLUMNS) & set(read))) or "none"
            raise MalformedRecord(
                f"has {column}, which is not read (media columns that are: {known}): set it in "
                "attr as images or videos, or remove it; audio is not supported"
            )


def _with_placeholders(
    record: Mapping[str, Any], column: str, lists: dict[Modality, list[Any]]
) -> dict[str, Any]:
    """Replace the media parts of OpenAI messages by placeholders, and collect their sources."""
    entries = record.get(column)
    if not isinstance(entries, list):
        return dict(record)
    named: dict[Modality, list[Any]] = {modality: [] for modality in lists}
    messages = [_with_placeholder(entry, named) for entry in entries]
    for modality, sources in named.items():
        if sources and lists[modality]:
            raise MalformedRecord(
                f"has {modality}s in its messages and in a column: use one of them"
            )
        lists[modality] += sources
    return {**record, column: messages}


def _with_placeholder(entry: Any, named: dict[Modality, list[Any]]) -> Any:
    content = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(content, list):
        return entry
    parts = []
    for part in content:
        modality = _part_modality(part)
        if modality is not None:
            keys = (modality, f"{modality}_url", "url", "path")
            source = next((part[key] for key in keys if part.get(key) is not None), None)
            if source is not None:  # one without takes the next of the column
                named[modality].append(source.get("url") if isinstance(source, dict) else source)
            part = {"type": "text", "text": f"<{modality}>"}
        parts.append(part)
    return {**entry, "content": parts}


def _part_modality(part: Any) -> Modality | None:
    name = part.get("type") if isinstance(part, dict) else None
    if name in AUDIO:
        raise MalformedRecord(
            f"a message contains {name}: only text, images and videos are supported"
        )
    return PARTS.get(name) if isinstance(name, str) else None


def _with_sentinels(conversation: Conversation) -> Conversation:
    """Replace every placeholder by its sentinel."""

    def replace(text: str) -> str:
        return PLACEHOLDER.sub(
            lambda match: SENTINEL_OF[PLACEHOLDERS[match[0]]], SENTINEL.sub("", text)
        )

    def replaced(message: Message) -> Message:
        before = tuple(map(replaced, message.before))
        return message._replace(content=replace(message.content), before=before)

    messages = tuple(map(replaced, conversation.messages))
    return Conversation(messages, replace(conversation.system), conversation.tools)


def _full_text(conversation: Conversation) -> str:
    every = [one for message in conversation.messages for one in (*message.before, message)]
    return conversation.system + "".join(message.content for message in every)


def _check_count(modality: Modality, placeholders: int, media: int) -> None:
    if placeholders != media:
        raise MalformedRecord(
            f"has {placeholders} <{modality}> for {media} {modality}s: give one for each"
        )
