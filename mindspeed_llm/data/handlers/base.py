"""The base of handlers: the columns that they read and the files that they write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from mindspeed.config import ConfigError, did_you_mean
from mindspeed_llm.data.chat import ChatFormat, Segment
from mindspeed_llm.data.conversation import Conversation, MalformedRecord, UnusableRecord, dump
from mindspeed_llm.data.encoder import TextEncoder
from mindspeed_llm.data.readers import kind_of

Record = Mapping[str, Any]


class Output(NamedTuple):
    """One file of tokens: the sequence of a record that it stores, and which values of it."""

    key: str
    track: int
    content: Literal["ids", "labels", "ones"]


INSTRUCTION = (
    Output("input_ids", 0, "ids"),
    Output("attention_mask", 0, "ones"),
    Output("labels", 0, "labels"),
)
PAIRWISE = (
    Output("chosen_input_ids", 0, "ids"),
    Output("chosen_labels", 0, "labels"),
    Output("rejected_input_ids", 1, "ids"),
    Output("rejected_labels", 1, "labels"),
)
UNPAIRED = (*INSTRUCTION, Output("desirable", 1, "ids"))
"""The second track of a record is its tag."""
PROMPTS = (
    Output("input_ids", 0, "ids"),
    Output("attention_mask", 0, "ones"),
    Output("fields", 1, "ids"),
)
"""The second track of a record is its tag: what it has beside the prompt, as bytes."""


LABELS = {"true": 1, "1": 1, "false": 0, "0": 0}
"""How a text says whether a completion is desirable."""
SAME_ANSWERS = "chosen and rejected are the same"
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
"""Columns that training on text cannot use: a record with one is not silently reduced to text."""


@dataclass(frozen=True)
class Columns:
    """The column of the data for each role; "" for none."""

    names: Mapping[str, str]
    tags: Mapping[str, str]
    media: tuple[str, ...] = ()
    """Columns that must be empty."""

    def __getitem__(self, role: str) -> str:
        return self.names.get(role, "")


@dataclass(frozen=True)
class Context:
    """The dependencies of a handler."""

    columns: Columns
    encoder: TextEncoder
    chat: ChatFormat | None = None
    placeholder_token: str = ""
    reward_tokens: Sequence[str] = ()


class Handler(ABC):
    """Renders records of one layout; `render` returns one list of segments per sequence."""

    outputs: ClassVar[tuple[Output, ...]]
    roles: ClassVar[Mapping[str, str]]
    """The keys of `--map-keys`, and the default column of each."""
    required: ClassVar[tuple[str, ...]]
    tags: ClassVar[Mapping[str, str]] = {}
    needs_chat: ClassVar[bool] = True
    has_completion: ClassVar[bool] = True
    """Whether a record without a trained token is dropped."""
    is_tagged: ClassVar[bool] = False
    """Whether numbers are stored for every record, as the last track of the outputs."""
    keeps_fields: ClassVar[bool] = False
    """Whether all columns are read, not only those with a role."""
    checked: ClassVar[Collection[str]] = ()
    """Columns without a role that a record is refused for."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._columns = context.columns

    @classmethod
    def ends_with_answer(cls) -> bool:
        """Return whether samples end with an answer: prompts and judged steps do not."""
        return cls.needs_chat and cls.has_completion

    @classmethod
    def find_columns(cls, map_keys: Mapping[str, Any], present: Sequence[str]) -> Columns:
        """Combine `--map-keys` with the defaults, and check both against the present columns."""
        media, map_keys = split_media(map_keys)
        _check_keys(map_keys, [*cls.roles, *(["tags"] if cls.tags else [])])
        given = {key: _text_value(key, map_keys[key]) for key in map_keys if key != "tags"}
        names = {**cls._defaults(map_keys, present), **given}
        for role in dict.fromkeys([*given, *cls.required]):
            if not names[role] and role in cls.required:
                raise ConfigError(f"--map-keys: {cls.__name__} requires {role}")
            if names[role] and names[role] not in present:
                raise _no_column(role, names[role], present)
        unused = tuple(column for column in media if column not in names.values())
        return Columns(names, cls._find_tags(map_keys.get("tags")), unused)

    @classmethod
    def _defaults(cls, map_keys: Mapping[str, Any], present: Sequence[str]) -> dict[str, str]:
        """Return the columns that are read without `--map-keys`."""
        required = cls.required
        return {r: name for r, name in cls.roles.items() if r in required or name in present}

    @classmethod
    def _find_tags(cls, given: Any) -> Mapping[str, str]:
        if given is None:
            return cls.tags
        if not isinstance(given, dict):
            raise ConfigError(f"--map-keys: tags holds {kind_of(given)}: give an object")
        _check_keys(given, list(cls.tags))
        return {**cls.tags, **{key: _text_value(key, given[key]) for key in given}}

    @abstractmethod
    def render(self, record: Record) -> list[list[Segment]]:
        """Render the sequences of one record."""

    def tag(self, record: Record) -> Sequence[int]:
        """Return the numbers that are stored for a record; for handlers with `is_tagged`."""
        raise NotImplementedError

    def _render_chat(self, conversation: Conversation) -> list[Segment]:
        assert self._context.chat is not None
        return self._context.chat.render(conversation)

    def _tools(self, record: Record) -> str:
        """Return the tools as JSON text; a column may hold them as text or as values."""
        column = self._columns["tools"]
        tools = record.get(column) if column else None
        return dump(tools) if isinstance(tools, (list, dict)) else as_text(tools, column)

    def _text(self, record: Record, role: str) -> str:
        """Return the text of a column; null and an absent optional column are empty."""
        column = self._columns.names.get(role)
        if not column:
            return ""
        value = record.get(column)
        if value is None and column not in record and role in self.required:
            raise MalformedRecord(f"has no {column}; it has {', '.join(record) or 'nothing'}")
        return as_text(value, column)


class UnpairedHandler(Handler):
    """Completions with a label, true or false: whether each is desirable."""

    outputs: ClassVar[tuple[Output, ...]] = UNPAIRED
    is_tagged = True

    @classmethod
    def _defaults(cls, map_keys: Mapping[str, Any], present: Sequence[str]) -> dict[str, str]:
        """Return the columns that are read without `--map-keys`: the label may be a kto_tag."""
        # Whatever the label is called, the other columns are found as if it were there.
        names = super()._defaults(map_keys, [*present, cls.roles["kto_tag"]])
        if names["kto_tag"] not in present and "kto_tag" in present:
            names["kto_tag"] = "kto_tag"
        return names

    def tag(self, record: Record) -> Sequence[int]:
        """Return whether the completion is desirable."""
        return (read_label(record, self._columns["kto_tag"]),)


def as_text(value: Any, column: str) -> str:
    """Return a text, with "" for null; anything else is malformed."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    raise MalformedRecord(f"{column} holds {kind_of(value)}, not text")


def split_media(map_keys: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the columns of media that must be empty, and the rest of `--map-keys`.

    `{"images": ""}` switches a column off, as it does with the others.
    """
    off = [key for key in map_keys if key in MEDIA and map_keys[key] == ""]
    rest = {key: value for key, value in map_keys.items() if key not in off}
    return tuple(column for column in MEDIA if column not in off), rest


def check_media(record: Record, media: Sequence[str]) -> None:
    """Refuse a record with images, audio or video: training on text would ignore them."""
    for column in media:
        value = record.get(column)
        if any(value) if isinstance(value, list) else value:
            raise MalformedRecord(
                f"has {column}, which training on text cannot use: train with mindspeed-mm, or "
                f"""ignore the column with --map-keys '{{"{column}": ""}}'"""
            )


def train_last_completion(segments: Sequence[Segment]) -> list[Segment]:
    """Train only the last completion; a template may append more to it, such as a line break."""
    end = max((index for index, each in enumerate(segments) if each.is_completion), default=-1)
    before = [index for index in range(end) if not segments[index].is_completion]
    start = max(before, default=-1)
    return [Segment(p.parts, p.is_completion and i > start) for i, p in enumerate(segments)]


def distinct(tracks: list[list[Segment]]) -> list[list[Segment]]:
    """Return the sequences of a pair, which must not be the same."""
    if tracks[0] == tracks[1]:
        raise UnusableRecord(SAME_ANSWERS)
    return tracks


def read_label(record: Record, column: str) -> int:
    """Return 1 for a desirable completion, 0 for an undesirable one."""
    value = record.get(column)
    if isinstance(value, str):  # tables of text have nothing else
        value = LABELS.get(value.strip().lower(), value)
    if isinstance(value, bool) or value in (0, 1):
        return int(value)
    shown = f"the text {value[:20]!r}" if isinstance(value, str) else kind_of(value)
    raise MalformedRecord(f"{column} holds {shown}: give true or false")


def _check_keys(given: Iterable[str], allowed: Sequence[str]) -> None:
    for key in given:
        if key not in allowed:
            raise ConfigError(f"--map-keys: {key} is not known; {did_you_mean(key, allowed)}")


def _text_value(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"--map-keys: {key} holds {kind_of(value)}: give the name of a column")
    return value


def _no_column(role: str, column: str, present: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"the data has no column {column} for {role}; it has {', '.join(sorted(present))}: "
        "name the right one with --map-keys"
    )
