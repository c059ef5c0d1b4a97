"""Chat templates: entries of a JSON file, validated, compiled for one tokenizer and rendered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from mindspeed.config import ConfigError, did_you_mean, parse_json
from mindspeed_llm.data.chat import Part, Segment, Thinking
from mindspeed_llm.data.conversation import Conversation, Message, read_calls, tool_lines
from mindspeed_llm.data.tokenizer import TokenizerFacts, special_matcher, split_special

DEFAULT_PATH = Path("configs/finetune/templates.json")
SHIPPED_PATH = Path(__file__).parents[2] / DEFAULT_PATH
SLOT_KINDS = 'a text, {"token": "..."} or a list of "bos_token" and "eos_token"'
FIELD = re.compile(r"\{\{(content|idx|name|arguments)\}\}")


class TokenSlot(BaseModel):
    """A special token."""

    model_config = ConfigDict(extra="forbid")

    token: str


class Slots(BaseModel):
    """A section of a template: texts with {{fields}}, {"token": t}, ["bos_token"/"eos_token"]."""

    model_config = ConfigDict(extra="forbid")

    slots: list[str | TokenSlot | list[Literal["bos_token", "eos_token"]]]
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
    """A placeholder for a value in compiled slots."""

    name: str


CompiledSlots = tuple[Part | Field, ...]


def load_template(name: str, path: str | None = None) -> TemplateEntry:
    """Read one template, by name, from the file of templates."""
    file = Path(path) if path else (DEFAULT_PATH if DEFAULT_PATH.is_file() else SHIPPED_PATH)
    entries = _read_entries(file)
    if name not in entries:
        hint = did_you_mean(name, [*entries, "tokenizer"])
        raise ConfigError(f"--prompt-type {name}: {file} has no such template; {hint}")
    try:
        return TemplateEntry.model_validate(entries[name])
    except ValidationError as error:
        first = error.errors()[0]
        where, message = first["loc"], first["msg"]
        if len(where) > 3:  # a section, "slots", the number, and one of the kinds of a slot
            where, message = where[:3], f"{SLOT_KINDS} is needed"
        field = ".".join(map(str, where))
        raise ConfigError(f"{file}: template {name}, {field}: {message}") from None


def _read_entries(file: Path) -> dict[str, Any]:
    try:
        content = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: the templates cannot be read: {error}") from None
    if not isinstance(content, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in content
    ):
        raise ConfigError(f"{file}: it must be a list of objects, each with a name")
    names = [entry["name"] for entry in content]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ConfigError(f"{file}: the template {duplicates[0]} is defined twice")
    return dict(zip(names, content))


class Template:
    """A template whose special tokens are ids of one tokenizer."""

    def __init__(self, entry: TemplateEntry, facts: TokenizerFacts) -> None:
        self.entry = entry
        self._facts = facts
        self._special = special_matcher(facts)
        self.eos_id = self._find_eos()
        self.user = self._compile(entry.format_user)
        self.assistant = self._compile(entry.format_assistant or self._default_completion())
        self.system = self._compile(entry.format_system)
        self.function = self._compile(entry.format_function)
        self.observation = self._compile(entry.format_observation or entry.format_user)
        self.observation_separator = self._compile(entry.format_observation_separator)
        self.tools = self._compile(entry.format_tools)
        self.separator = self._compile(entry.format_separator)
        self.prefix = self._compile(entry.format_prefix)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion in generation."""
        known = [self._facts.id_of(word) for word in self.entry.stop_words]
        return tuple(dict.fromkeys(one for one in (self.eos_id, *known) if one is not None))

    @property
    def trains_eos(self) -> bool:
        """Whether a completion always ends with a stop token."""
        ends = self.assistant[-1] if self.assistant else None
        return self.eos_id is not None and (self.entry.efficient_eos or ends in self.stop_ids)

    def _find_eos(self) -> int | None:
        if not self.entry.replace_eos:
            return self._facts.eos_id
        if not self.entry.stop_words:
            raise ConfigError(f"template {self.entry.name}: replace_eos needs stop_words")
        return self._token(self.entry.stop_words[0])

    def _default_completion(self) -> Slots:
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

    def _compile(self, slots: Slots) -> CompiledSlots:
        parts: list[Part | Field] = []
        for slot in slots.slots:
            if isinstance(slot, TokenSlot):
                parts.append(self._token(slot.token))
            elif isinstance(slot, list):
                ids = {"bos_token": self._facts.id_of(self._facts.bos), "eos_token": self.eos_id}
                parts.extend(found for name in slot if (found := ids[name]) is not None)
            else:
                parts.extend(self._compile_text(slot))
        return tuple(parts)

    def _compile_text(self, text: str) -> list[Part | Field]:
        """Split a text at its fields and at the special tokens it spells out."""
        parts: list[Part | Field] = []
        for index, text_or_field in enumerate(FIELD.split(text)):
            is_field = index % 2
            parts.extend([Field(text_or_field)] if is_field else self.split(text_or_field))
        return parts

    def split(self, text: str) -> list[Part]:
        """Split a text at the special tokens it spells out, which become ids."""
        return split_special(text, self._special, self._facts)


class SlotFormatter:
    """Compiled slots ready to be filled many times; adjacent texts are one part."""

    def __init__(self, slots: Iterable[Part | Field]) -> None:
        self._parts: list[Part] = []
        self._fields: dict[int, list[tuple[str, str]]] = {}
        """By index of the part: the name of each of its fields, and the text after it."""
        for part in slots:
            if isinstance(part, int):
                self._parts.append(part)
            elif part != "":
                self._add(part)

    def _add(self, part: str | Field) -> None:
        if not self._parts or isinstance(self._parts[-1], int):
            self._parts.append("")
        last = len(self._parts) - 1
        if isinstance(part, Field):
            self._fields.setdefault(last, []).append((part.name, ""))
        elif last in self._fields:
            name, text = self._fields[last][-1]
            self._fields[last][-1] = (name, text + part)
        else:
            self._parts[last] += part  # type: ignore[operator]

    def apply(self, values: Mapping[str, str]) -> list[Part]:
        """Replace the fields by values; empty texts are omitted."""
        parts, has_empty = self._parts.copy(), False
        for index, fields in self._fields.items():
            text = parts[index]
            for name, after in fields:
                text = f"{text}{values.get(name, '')}{after}"
            parts[index] = text
            has_empty = has_empty or not text
        return [part for part in parts if part != ""] if has_empty else parts


def insert_before_content(slots: CompiledSlots, added: Sequence[Part]) -> CompiledSlots:
    """Insert parts before the content of compiled slots."""
    content = Field("content")
    return tuple(p for part in slots for p in ((*added, part) if part == content else (part,)))


CACHED_PROMPTS = 100
"""Compiled prompts kept: those of as many system prompts."""


class TemplateFormat:
    """Renders conversations by a template."""

    def __init__(self, template: Template, thinking: Thinking = "none") -> None:
        self._template = template
        self._entry = template.entry
        self._reasons = template.entry.template_class == "ReasoningTemplate"
        self._thinking = thinking
        # Few prompts differ in more than the question: the rest is compiled once.
        self._cached_prompt = lru_cache(CACHED_PROMPTS)(self._make_prompt)
        self._completion = SlotFormatter(template.assistant)
        self.title = f"the template {template.entry.name}"
        self.eos_id = template.eos_id
        self.stop_ids = template.stop_ids
        self.trains_eos = template.trains_eos
        if thinking == "true" and not self._reasons:
            raise ConfigError(
                f"--enable-thinking true: the template {self._entry.name} has no thoughts; "
                "use one of class ReasoningTemplate, such as qwen3"
            )

    def render(self, conversation: Conversation) -> list[Segment]:
        """Return prompts and completions in turn; the last prompt may have no completion."""
        segments: list[Segment] = []
        messages, system, tools = conversation
        late_eos = self._entry.efficient_eos and self.eos_id is not None
        for turn, (prompt, completion) in enumerate(zip_longest(messages[::2], messages[1::2])):
            following = messages[2 * turn + 2 : 2 * turn + 3]
            is_step = bool(following) and following[0].role == "observation"
            thoughts, text = self._split_thoughts(completion, is_step)
            opening = None if turn else (system, tools)
            if prompt.before:
                form = self._make_prompt(opening, True, thoughts, prompt.before)
            else:
                form = self._cached_prompt(opening, prompt.role == "observation", thoughts)
            values = {"content": prompt.content, "idx": str(turn)}
            ended = late_eos and turn and messages[2 * turn - 1].is_trained
            first_label = self.eos_id if ended else None
            segments.append(Segment(form.apply(values), False, first_label))
            if completion is not None:
                parts = self._render_completion(completion, text)
                segments.append(Segment(parts, completion.is_trained))
        if late_eos and messages[-1].role == "assistant":
            segments.append(Segment([self.eos_id], messages[-1].is_trained))  # type: ignore[list-item]
        return segments

    def _make_prompt(
        self,
        opening: tuple[str, str] | None,
        is_tool: bool,
        thoughts: str,
        before: tuple[Message, ...] = (),
    ) -> SlotFormatter:
        """Compile a prompt; the first of a conversation opens with its system prompt and tools."""
        template = self._template
        slots = template.observation if is_tool else template.user
        separator = SlotFormatter(template.observation_separator).apply({}) if before else []
        for message in reversed(before):
            slots = insert_before_content(slots, [message.content, *separator])
        if opening is None:
            return SlotFormatter([*SlotFormatter(template.separator).apply({}), *slots, thoughts])
        system = self._system(*opening)
        if self._entry.template_class == "Llama2Template":
            slots, system = insert_before_content(slots, system), []
        return SlotFormatter([*SlotFormatter(template.prefix).apply({}), *system, *slots, thoughts])

    def _system(self, given: str, given_tools: str) -> list[Part]:
        default = self._entry.default_system
        text = given or (default if isinstance(default, str) else "\n".join(default))
        tools = tool_lines(given_tools)
        if not (text or tools or self._entry.force_system):
            return []
        template = self._template
        described = SlotFormatter(template.tools).apply({"content": tools}) if tools else []
        if not text and described and isinstance(described[0], str):
            described[0] = described[0].lstrip("\n")  # it separates tools from the system text
        return SlotFormatter(insert_before_content(template.system, [text, *described])).apply({})

    def _split_thoughts(self, completion: Message | None, is_step: bool = False) -> tuple[str, str]:
        """Return the thoughts that belong to the prompt, and the text of the completion.

        A step is a completion that calls tools and is followed by their results.
        """
        text = completion.content if completion else ""
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
            after = text[end + len(closing.strip()) :].lstrip("\n")
            return "", f"{opening}{thoughts}{closing}{after}"
        if has_thoughts or (completion is None and self._thinking != "false"):
            return "", text
        if is_step and self._thinking == "none":
            return "", text  # as the models' own templates do
        empty = opening + closing
        return ("", empty + text) if self._thinking == "true" else (empty, text)

    def _render_completion(self, completion: Message, text: str) -> list[Part]:
        if not completion.calls:
            return self._completion.apply({"content": text})
        content: list[Part] = [text]
        has_text = bool(text) and not (
            self._reasons and text.endswith(self._entry.thought_words[1])
        )
        for number, call in enumerate(read_calls(completion.calls)):
            content += ["\n"] if number or has_text else []
            content += SlotFormatter(self._template.function).apply(call._asdict())
        return SlotFormatter(insert_before_content(self._template.assistant, content)).apply({})
