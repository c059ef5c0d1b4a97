"""The error for everything a user can fix, and the texts and JSON that such errors are about."""

import json
import re
from typing import Any


class ConfigError(ValueError):
    """What was given, what is allowed and what to do; commands print it and exit with 2."""


class RankConfigError(ConfigError):
    """What a user can fix and only some ranks know, such as one pipeline stage: each reports it."""


def printable(text: str) -> str:
    """Put a text on one line and spell out what is no letter to a terminal.

    Names in damaged files may hold anything, and messages of other libraries have several lines.
    """
    text = re.sub(r"\s*[\r\n]\s*", " ", text.strip())
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def kind_of(value: object) -> str:
    """Name the kind of a value as JSON does."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true or false"
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Return what a JSON text holds; for one that no parser can take the error is a ValueError."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
