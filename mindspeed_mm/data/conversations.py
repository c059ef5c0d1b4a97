"""Records to stretches of prompt and answer in which images and videos have their places."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.config import ConfigError
from mindspeed_llm.data.chat import Piece, TemplateFormat, Thinking
from mindspeed_llm.data.chat_jinja import JinjaFormat
from mindspeed_llm.data.conversation import Conversation, MalformedRecord, Message
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.handlers.alpaca import AlpacaStyleInstructionHandler
from mindspeed_llm.data.handlers.base import Columns, Context, Handler
from mindspeed_llm.data.handlers.openai import OpenAIInstructionHandler
from mindspeed_llm.data.handlers.sharegpt import SharegptStyleInstructionHandler
from mindspeed_llm.data.template import (
    Part,
    Template,
    load_template,
    special_matcher,
    split_special,
)
from mindspeed_llm.data.tokenizer import TokenizerFacts
from mindspeed_mm.data.media import Kind, Medium
from mindspeed_mm.data.options import OWN_TEMPLATES, AttrOptions, BasicOptions

MARKS: dict[str, Kind] = {"<image>": "image", "<video>": "video"}
MARK = re.compile("<image>|<video>")
PARTS: dict[str, Kind] = {"image": "image", "image_url": "image"}
PARTS |= {"video": "video", "video_url": "video"}
SIGNS: dict[str, Kind] = {"\U0010fff2": "image", "\U0010fff3": "video"}
"""Stand for media while a template runs: private-use characters that no template touches."""
SIGN = re.compile("([\U0010fff2\U0010fff3])")
SIGN_OF = {kind: sign for sign, kind in SIGNS.items()}
NEVER = "\0"
"""A tag that no message has."""


@dataclass(frozen=True)
class Request:
    """A record that was read: its conversation and its media in the order of their places."""

    conversation: Conversation
    media: tuple[Medium, ...]


class _Keep:
    """Takes the place of a chat format in a handler: keeps the conversation instead of writing."""

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

    def read(self, record: Mapping[str, Any], folder: Path) -> Request:
        """Read a record whose file is in `folder`; say what is wrong with it, if something is."""
        lists = {kind: _as_list(record.get(column or "")) for kind, column in self._columns()}
        if self._attr.formatting == "openai":
            record = _with_marks(record, self._attr.messages or "messages", lists)
        self._handler.render(record)
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


class MediaFormat:
    """Writes conversations with the token of its processor in the place of each medium."""

    def __init__(self, facts: TokenizerFacts, tokens: Mapping[Kind, int], basic: BasicOptions):
        self._facts, self._special = facts, special_matcher(facts)
        self.tokens = dict(tokens)
        thinking: Thinking = "none"
        if basic.enable_thinking is not None:
            thinking = "true" if basic.enable_thinking else "false"
        own = StructuredJinja(facts, thinking) if facts.chat_template else None
        self._chat: StructuredJinja | TemplateFormat
        if basic.template not in OWN_TEMPLATES:
            self._chat = _named(basic.template, facts, thinking)
        elif own is not None:
            self._chat = own
        else:
            raise ConfigError(
                f"template {basic.template}: {facts.source} has no chat template; "
                "name one of configs/finetune/templates.json"
            )
        self._around = {kind: self._written_by(own, kind) for kind in tokens}

    def render(self, conversation: Conversation) -> list[Piece]:
        """Write prompts and answers in turn."""
        pieces = self._chat.render(conversation)
        return [piece._replace(parts=self._place(piece.parts)) for piece in pieces]

    def _place(self, parts: Sequence[Part]) -> list[Part]:
        placed: list[Part] = []
        for part in parts:
            for text in SIGN.split(part) if isinstance(part, str) else [part]:
                placed += self._around[SIGNS[text]] if text in SIGNS else [text]
        return [part for part in placed if part != ""]

    def _written_by(self, own: StructuredJinja | None, kind: Kind) -> list[Part]:
        """Return what stands for a medium where the template only knows text."""
        text = own.between(kind) if own is not None else None
        parts = split_special(text, self._special, self._facts) if text else []
        return parts if self.tokens[kind] in parts else [self.tokens[kind]]


class StructuredJinja(JinjaFormat):
    """The model's own chat template; contents are lists of parts where it understands them."""

    def __init__(self, facts: TokenizerFacts, thinking: Thinking) -> None:
        self._structured = True
        super().__init__(facts, thinking=thinking)
        self._structured = "'type'" not in (probe := self._probe("image")) and "(A" in probe

    def between(self, kind: Kind) -> str | None:
        """Return what the template writes for a medium between two texts, if it stands there."""
        if not self._structured:
            return None
        _, found, rest = self._probe(kind).partition("(A")
        text, end, _ = rest.partition("B)")
        return text if found and end else None

    def _probe(self, kind: Kind) -> str:
        message = Message("user", f"(A{SIGN_OF[kind]}B)")
        try:
            return self._run(self._messages(Conversation((message,))), None, generate=False)
        except MalformedRecord:
            return ""

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        messages = super()._messages(conversation)
        if self._structured:
            for message in messages:
                message["content"] = _parts(message["content"])
        return messages


def _parts(text: str) -> list[dict[str, str]]:
    pieces = [piece for piece in SIGN.split(text) if piece]
    return [
        {"type": SIGNS[piece]} if piece in SIGNS else {"type": "text", "text": piece}
        for piece in pieces
    ]


def _named(name: str, facts: TokenizerFacts, thinking: Thinking) -> TemplateFormat:
    try:
        return TemplateFormat(Template(load_template(name), facts), thinking)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--prompt-type", "template", 1)) from None


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
    return PARTS.get(name) if isinstance(name, str) else None


def _signed(conversation: Conversation) -> Conversation:
    """Put a sign in the place of every mark."""

    def sign(text: str) -> str:
        return MARK.sub(lambda match: SIGN_OF[MARKS[match[0]]], SIGN.sub("", text))

    messages = tuple(m._replace(content=sign(m.content)) for m in conversation.messages)
    return Conversation(messages, sign(conversation.system), conversation.tools)


def _said(conversation: Conversation) -> str:
    return conversation.system + "".join(message.content for message in conversation.messages)


def _check_count(kind: Kind, marks: int, media: int) -> None:
    if marks != media:
        raise MalformedRecord(f"has {marks} <{kind}> for {media} {kind}s: they must be as many")
