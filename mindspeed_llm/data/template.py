"""Chat templates: entries of a JSON file, checked, compiled for one tokenizer and rendered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from mindspeed.config import ConfigError, did_you_mean, parse_json
from mindspeed_llm.data.chat import Part, Piece, Thinking
from mindspeed_llm.data.conversation import Conversation, Message, read_calls, tool_lines
from mindspeed_llm.data.tokenizer import TokenizerFacts, special_matcher, split_special

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
        self._special = special_matcher(facts)
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


FORMS = 100
"""How many forms of prompts are remembered: those of as many system prompts."""


class TemplateFormat:
    """Writes conversations by a template."""

    def __init__(self, template: Template, thinking: Thinking = "none") -> None:
        self._template = template
        self._entry = template.entry
        self._reasons = template.entry.template_class == "ReasoningTemplate"
        self._thinking = thinking
        # Few prompts differ in more than the question: what is the same is put together once.
        self._prompt = lru_cache(FORMS)(self._make_prompt)
        self._answer = Form(template.assistant)
        self.title = f"the template {template.entry.name}"
        self.eos_id = template.eos_id
        self.stop_ids = template.stop_ids
        self.teaches_eos = template.teaches_eos
        if thinking == "true" and not self._reasons:
            raise ConfigError(
                f"--enable-thinking true: the template {self._entry.name} has no thoughts; "
                "use one of class ReasoningTemplate, such as qwen3"
            )

    def render(self, conversation: Conversation) -> list[Piece]:
        """Write prompts and answers in turn; a last prompt without answer is written too."""
        pieces: list[Piece] = []
        messages, system, tools = conversation
        late_eos = self._entry.efficient_eos and self.eos_id is not None
        for turn, (asked, answer) in enumerate(zip_longest(messages[::2], messages[1::2])):
            goes_on = messages[2 * turn + 2 : 2 * turn + 3]
            is_step = bool(goes_on) and goes_on[0].role == "observation"
            thoughts, text = self._think(answer, is_step)
            opening = None if turn else (system, tools)
            if asked.before:
                form = self._make_prompt(opening, True, thoughts, asked.before)
            else:
                form = self._prompt(opening, asked.role == "observation", thoughts)
            values = {"content": asked.content, "idx": str(turn)}
            first_label = self.eos_id if late_eos and turn else None
            pieces.append(Piece(form.fill(values), False, first_label))
            if answer is not None:
                pieces.append(Piece(self._write_answer(answer, text), True))
        if late_eos and pieces[-1].is_answer:
            pieces.append(Piece([self.eos_id], True))  # type: ignore[list-item]
        return pieces

    def _make_prompt(
        self,
        opening: tuple[str, str] | None,
        is_tool: bool,
        thoughts: str,
        before: tuple[Message, ...] = (),
    ) -> Form:
        """Prepare a prompt; the first of a conversation opens with its system text and tools."""
        template = self._template
        stretch = template.observation if is_tool else template.user
        between = Form(template.between_observations).fill({}) if before else []
        for message in reversed(before):
            stretch = put_before_content(stretch, [message.content, *between])
        if opening is None:
            return Form([*Form(template.separator).fill({}), *stretch, thoughts])
        system = self._system(*opening)
        if self._entry.template_class == "Llama2Template":
            stretch, system = put_before_content(stretch, system), []
        return Form([*Form(template.prefix).fill({}), *system, *stretch, thoughts])

    def _system(self, given: str, given_tools: str) -> list[Part]:
        default = self._entry.default_system
        text = given or (default if isinstance(default, str) else "\n".join(default))
        tools = tool_lines(given_tools)
        if not (text or tools or self._entry.force_system):
            return []
        template = self._template
        described = Form(template.tools).fill({"content": tools}) if tools else []
        if not text and described and isinstance(described[0], str):
            described[0] = described[0].lstrip("\n")  # it separates tools from the system text
        return Form(put_before_content(template.system, [text, *described])).fill({})

    def _think(self, answer: Message | None, is_step: bool = False) -> tuple[str, str]:
        """Return what of the thoughts goes to the prompt, and the text of the answer.

        A step is an answer that calls tools and goes on with their results.
        """
        text = answer.content if answer else ""
        if not self._reasons:
            return "", text
        opening, closing = self._entry.thought_words
        start, end = text.find(opening.strip()), text.find(closing.strip())
        has_thoughts = 0 <= start < end
        if has_thoughts and self._thinking == "false":
            text = text[:start] + text[end + len(closing.strip()) :].lstrip("\n")
            has_thoughts = False
        if has_thoughts and not text[:start].strip():
            thoughts = text[start + len(opening.strip()) : end].strip("\n")
            behind = text[end + len(closing.strip()) :].lstrip("\n")
            return "", f"{opening}{thoughts}{closing}{behind}"
        if has_thoughts or (answer is None and self._thinking != "false"):
            return "", text
        if is_step and self._thinking == "none":
            return "", text  # as the models' own templates do
        empty = opening + closing
        return ("", empty + text) if self._thinking == "true" else (empty, text)

    def _write_answer(self, answer: Message, text: str) -> list[Part]:
        if not answer.calls:
            return self._answer.fill({"content": text})
        said: list[Part] = [text]
        has_text = bool(text) and not (
            self._reasons and text.endswith(self._entry.thought_words[1])
        )
        for number, call in enumerate(read_calls(answer.calls)):
            said += ["\n"] if number or has_text else []
            said += Form(self._template.function).fill(call._asdict())
        return Form(put_before_content(self._template.assistant, said)).fill({})
