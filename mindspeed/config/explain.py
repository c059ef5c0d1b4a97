"""Build options from plain values; what pydantic finds wrong is told in the user's spelling."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from pydantic import ValidationError

from mindspeed.config.annotations import in_words
from mindspeed.config.errors import ConfigError
from mindspeed.config.options import Options
from mindspeed.config.suggest import did_you_mean

OptionsT = TypeVar("OptionsT", bound=Options)

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
    """Validate plain values; raise one ConfigError that tells everything that is wrong."""
    try:
        return options_class.model_validate(dict(values))
    except ValidationError as error:
        problems = [_explain(item, options_class, spelling) for item in error.errors()]
    raise ConfigError((f"{source}: " if source else "") + "; ".join(problems))


def _explain(item: Any, options_class: type[Options], spelling: Spelling) -> str:
    field, given, kind = str(item["loc"][0]) if item["loc"] else "", item["input"], item["type"]
    if not field:
        return _message(item)
    if kind == "extra_forbidden":
        hint = did_you_mean(
            spelling.name_of(field), map(spelling.name_of, options_class.model_fields)
        )
        return f"unknown {spelling.value} {spelling.with_value(field, given)}; {hint}"
    if kind == "missing":
        return f"{spelling.name_of(field)} is missing"
    shown = spelling.with_value(field, given)
    if len(item["loc"]) > 1:
        shown = f"{spelling.name_of(field)} holds {_plain(given)}, which"
    if kind.endswith(TYPE_ERRORS):
        allowed = in_words(options_class.model_fields[field].annotation)
        return f"{shown} is not allowed: give {allowed}"
    return f"{shown} is not allowed: {_message(item)}"


def _message(item: Any) -> str:
    """Return the text of the validator that refused, else pydantic's own."""
    raised = item.get("ctx", {}).get("error")
    return str(raised or item["msg"]).replace("Input should", "it should")


def _plain(value: object) -> str:
    """Write a value as in a file or on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return " ".join(map(_plain, value))
    return str(value)
