"""Build options from plain values; what pydantic finds wrong is reported in the user's spelling."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from pydantic import ValidationError

from mindspeed.config.errors import ConfigError
from mindspeed.config.options import Options, in_words, without_none
from mindspeed.config.suggest import did_you_mean
from mindspeed.config.synonyms import by_meaning

OptionsT = TypeVar("OptionsT", bound=Options)

LONGEST = 80
"""Letters of a value that an error shows."""
# Errors about the type itself; all others (bounds, validators) carry a message of their own.
TYPE_ERRORS = ("_type", "_parsing", "literal_error", "int_from_float")


class Spelling(Enum):
    """How the user wrote the options: each member names itself as in "unknown flag"."""

    FLAG = "flag"
    KEY = "key"
    KEYWORD = "option"

    def name_of(self, field: str) -> str:
        """Spell a field as the user did."""
        return "--" + field.replace("_", "-") if self is Spelling.FLAG else field

    def with_value(self, field: str, value: object) -> str:
        """Spell a field and its value as the user did."""
        if self is Spelling.FLAG:
            return f"{self.name_of(field)} {_plain(value)}"
        return f"{field}: {_plain(value)}" if self is Spelling.KEY else f"{field}={value!r}"


def build(
    options_class: type[OptionsT],
    values: Mapping[str, Any],
    spelling: Spelling = Spelling.KEYWORD,
    source: str = "",
) -> OptionsT:
    """Validate plain values; raise one ConfigError that lists everything that is wrong."""
    try:
        return options_class.model_validate(dict(values))
    except ValidationError as error:
        names = options_class.accepted_names()
        old_names = {names[name]: name for name in values if name in names}
        problems = [_explain(item, options_class, spelling, old_names) for item in error.errors()]
    raise ConfigError((f"{source}: " if source else "") + "; ".join(problems))


def _explain(
    item: Any, options_class: type[Options], spelling: Spelling, old_names: Mapping[str, str]
) -> str:
    given, kind = item["input"], item["type"]
    owner, field, is_inside = _locate(item["loc"], options_class)
    if not field:
        return _message(item)
    name = field.rpartition(".")[2]
    if kind == "extra_forbidden":
        hint = by_meaning(name, owner.model_fields, spelling.name_of) or did_you_mean(
            spelling.name_of(name), map(spelling.name_of, owner.model_fields)
        )
        return f"unknown {spelling.value} {spelling.with_value(field, given)}; {hint}"
    if kind == "missing":
        return f"{spelling.name_of(field)} is missing"
    if section := _section(owner, name):
        keys = f"give keys and values, of {', '.join(section.model_fields)}"
        return f"{field}: {keys if kind.endswith(TYPE_ERRORS) else _message(item)}"
    typed = old_names.get(field, field)
    shown = spelling.with_value(typed, given)
    if is_inside:
        shown = f"{spelling.name_of(typed)} holds {_plain(given)}, which"
    if kind.endswith(TYPE_ERRORS) and name in owner.model_fields:
        allowed = in_words(owner.model_fields[name].annotation)
        return f"{shown} is not allowed: give {allowed}"
    return f"{shown} is not allowed: {_message(item)}"


def _locate(loc: tuple[Any, ...], owner: type[Options]) -> tuple[type[Options], str, bool]:
    """Return the class whose field is wrong, its dotted name, and if an element of it is meant."""
    for depth, name in enumerate(loc, 1):
        inner = _section(owner, str(name))
        if depth == len(loc) or inner is None:
            return owner, ".".join(map(str, loc[:depth])), depth < len(loc)
        owner = inner
    return owner, "", False


def _section(owner: type[Options], name: str) -> type[Options] | None:
    """Return the options class of a field that is a section of its own."""
    field = owner.model_fields.get(name)
    inner = without_none(field.annotation)[0] if field else None
    return inner if isinstance(inner, type) and issubclass(inner, Options) else None


def _message(item: Any) -> str:
    """Return the text of the validator that refused, else pydantic's own."""
    raised = item.get("ctx", {}).get("error")
    return str(raised or item["msg"]).replace("Input should", "it should")


def _plain(value: object) -> str:
    """Write a value as in a file or on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return _short(" ".join(map(_plain, value)))
    return _short(str(value))


def _short(text: str) -> str:
    """Cut a long value: the name of the option is enough to find it."""
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
