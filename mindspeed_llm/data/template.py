"""Chat templates: entries of a JSON file, checked and made ready for one tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from mindspeed.config import ConfigError, did_you_mean, parse_json
from mindspeed_llm.data.tokenizer import TokenizerFacts

DEFAULT_PATH = Path("configs/finetune/templates.json")
SHIPPED_PATH = Path(__file__).parents[2] / DEFAULT_PATH
FIELD = re.compile(r"\{\{(content|idx|name|arguments)\}\}")


class Slots(BaseModel):
    """A stretch of a template: texts with {{fields}}, {"token": t}, ["bos_token"/"eos_token"]."""

    model_config = ConfigDict(extra="forbid")

    slots: list[str | dict[Literal["token"], str] | list[Literal["bos_token", "eos_token"]]]
    tool_format: str | None = None


class TemplateEntry(BaseModel):
    """One entry of the template file."""

    model_config = ConfigDict(extra="forbid")

    name: str
    format_user: Slots = Slots(slots=["{{content}}"])
    format_assistant: Slots | None = None
    format_system: Slots = Slots(slots=["{{content}}"])
    format_function: Slots = Slots(slots=["Action: {{name}}\nAction Input: {{arguments}}"])
    format_observation: Slots | None = None
    format_observation_separator: Slots = Slots(slots=["\n"])
    format_tools: Slots = Slots(
        slots=[
            "\n\nTools you may call, one JSON object a line:\n{{content}}\n"
            "To call one, answer with two lines: `Action:` and its name, "
            "`Action Input:` and its arguments as JSON.\n"
        ]
    )
    format_separator: Slots = Slots(slots=[])
    format_prefix: Slots = Slots(slots=[])
    default_system: str | list[str] = ""
    stop_words: list[str] = []
    thought_words: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    efficient_eos: bool = False
    replace_eos: bool = False
    force_system: bool = False
    template_class: Literal[
        "Template", "LFDefaultTemplate", "Llama2Template", "ReasoningTemplate"
    ] = "Template"


class Field(NamedTuple):
    """The place of a value in a compiled stretch."""

    name: str


Part = str | int
"""What a rendered stretch is made of: text, and ids of special tokens."""

Stretch = tuple[Part | Field, ...]


def load_template(name: str, path: str | None = None) -> TemplateEntry:
    """Read one template, by name, from the file of templates."""
    place = Path(path) if path else (DEFAULT_PATH if DEFAULT_PATH.is_file() else SHIPPED_PATH)
    entries = _read(place)
    if name not in entries:
        hint = did_you_mean(name, [*entries, "tokenizer"])
        raise ConfigError(f"--prompt-type {name}: {place} has no such template; {hint}")
    try:
        return TemplateEntry.model_validate(entries[name])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{place}: template {name}, {where}: {first['msg']}") from None


def _read(place: Path) -> dict[str, Any]:
    try:
        content = parse_json(place.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place}: the templates cannot be read: {error}") from None
    if not isinstance(content, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in content
    ):
        raise ConfigError(f"{place}: it must be a list of objects, each with a name")
    names = [entry["name"] for entry in content]
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ConfigError(f"{place}: the template {doubles[0]} is there twice")
    return dict(zip(names, content))


class Template:
    """A template whose special tokens are ids of one tokenizer."""

    def __init__(self, entry: TemplateEntry, facts: TokenizerFacts) -> None:
        self.entry = entry
        self._facts = facts
        self._special = _matcher(facts.special)
        self.eos_id = self._find_eos()
        self.user = self._compile(entry.format_user)
        self.assistant = self._compile(entry.format_assistant or self._default_answer())
        self.system = self._compile(entry.format_system)
        self.function = self._compile(entry.format_function)
        self.observation = self._compile(entry.format_observation or entry.format_user)
        self.between_observations = self._compile(entry.format_observation_separator)
        self.tools = self._compile(entry.format_tools)
        self.separator = self._compile(entry.format_separator)
        self.prefix = self._compile(entry.format_prefix)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer when the model talks."""
        known = [self._facts.id_of(word) for word in self.entry.stop_words]
        return tuple(dict.fromkeys(one for one in (self.eos_id, *known) if one is not None))

    @property
    def teaches_eos(self) -> bool:
        """Whether an answer always ends with a token the model can stop at."""
        ends = self.assistant[-1] if self.assistant else None
        return self.eos_id is not None and (self.entry.efficient_eos or ends in self.stop_ids)

    def _find_eos(self) -> int | None:
        if not self.entry.replace_eos:
            return self._facts.eos_id
        if not self.entry.stop_words:
            raise ConfigError(f"template {self.entry.name}: replace_eos needs stop_words")
        return self._token(self.entry.stop_words[0])

    def _default_answer(self) -> Slots:
        ending: list[Any] = [] if self.entry.efficient_eos else [["eos_token"]]
        return Slots(slots=["{{content}}", *ending])

    def _token(self, token: str) -> int:
        found = self._facts.id_of(token)
        if found is None:
            raise ConfigError(
                f"--prompt-type {self.entry.name} needs the token {token}, which the tokenizer in "
                f"{self._facts.source} does not have: choose the template of this model"
            )
        return found

    def _compile(self, slots: Slots) -> Stretch:
        parts: list[Part | Field] = []
        for slot in slots.slots:
            if isinstance(slot, dict):
                parts.append(self._token(slot["token"]))
            elif isinstance(slot, list):
                ids = {"bos_token": self._facts.id_of(self._facts.bos), "eos_token": self.eos_id}
                parts.extend(found for name in slot if (found := ids[name]) is not None)
            else:
                parts.extend(self._compile_text(slot))
        return tuple(parts)

    def _compile_text(self, text: str) -> list[Part | Field]:
        """Cut a text at its fields and at the special tokens it spells out."""
        parts: list[Part | Field] = []
        for place, piece in enumerate(FIELD.split(text)):
            parts.extend([Field(piece)] if place % 2 else self.split(piece))
        return parts

    def split(self, text: str) -> list[Part]:
        """Cut a text at the special tokens it spells out, and give their ids."""
        return split_special(text, self._special, self._facts)


def _matcher(tokens: dict[str, int]) -> re.Pattern[str] | None:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if tokens else None


def special_matcher(facts: TokenizerFacts) -> re.Pattern[str] | None:
    """Return a pattern of the tokenizer's special tokens, None if it has none."""
    return _matcher(facts.special)


def split_special(text: str, special: re.Pattern[str] | None, facts: TokenizerFacts) -> list[Part]:
    """Cut a text at special tokens, and give their ids."""
    if special is None:
        return [text] if text else []
    pieces = special.split(text)
    return [facts.special[p] if i % 2 else p for i, p in enumerate(pieces) if p]


class Form:
    """A stretch made ready to be filled many times; its texts that touch are one part."""

    def __init__(self, stretch: Iterable[Part | Field]) -> None:
        self._parts: list[Part] = []
        self._gaps: dict[int, list[tuple[str, str]]] = {}
        """The parts with fields: the name of each, and the text behind it."""
        for part in stretch:
            if isinstance(part, int):
                self._parts.append(part)
            elif part != "":
                self._add(part)

    def _add(self, part: str | Field) -> None:
        if not self._parts or isinstance(self._parts[-1], int):
            self._parts.append("")
        place = len(self._parts) - 1
        if isinstance(part, Field):
            self._gaps.setdefault(place, []).append((part.name, ""))
        elif place in self._gaps:
            name, text = self._gaps[place][-1]
            self._gaps[place][-1] = (name, text + part)
        else:
            self._parts[place] += part  # type: ignore[operator]

    def fill(self, values: Mapping[str, str]) -> list[Part]:
        """Put values in the places of the fields; texts that are empty are left out."""
        parts, has_empty = self._parts.copy(), False
        for place, fields in self._gaps.items():
            text = parts[place]
            for name, behind in fields:
                text = f"{text}{values.get(name, '')}{behind}"
            parts[place] = text
            has_empty = has_empty or not text
        return [part for part in parts if part != ""] if has_empty else parts


def put_before_content(stretch: Stretch, front: Sequence[Part]) -> Stretch:
    """Give a stretch more parts in front of its content."""
    content = Field("content")
    return tuple(p for part in stretch for p in ((*front, part) if part == content else (part,)))
