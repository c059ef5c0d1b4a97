"""Nearest names for what was mistyped."""

import argparse
import difflib
import re
from collections.abc import Collection, Iterable
from typing import NoReturn

from mindspeed.config.errors import printable
from mindspeed.config.synonyms import by_meaning

LISTED = 20
"""How many known names an error lists in full; beyond that only the nearest are named."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most like `name`, or None when nothing is near."""
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return "did you mean x?", or the known names when nothing is near."""
    known = sorted(set(candidates))
    match = nearest(name, known)
    if match is not None:
        return f"did you mean {match}?"
    if len(known) > LISTED:
        known = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
        return f"the most similar known names are {one_of(known)}"
    return f"known: {', '.join(known)}"


def one_of(values: Iterable[object]) -> str:
    """Join values as "a, b or c"."""
    words = [str(value) for value in values]
    return " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def suggest_flags(parser: argparse.ArgumentParser) -> None:
    """Make the parser's error one line that ends with the nearest flag or choice.

    Its usage, which is hundreds of lines for some parsers, would push the error off the screen.
    """

    def error(message: str) -> NoReturn:
        known = {*parser._option_string_actions, *_choices(parser)}
        hints = [
            f"{word}: {hint}" for word in _unknown_names(message) if (hint := _hint(word, known))
        ]
        text = "; ".join([message, *dict.fromkeys(hints or ["--help lists what there is"])])
        parser.exit(2, f"{parser.prog}: error: {printable(text)}\n")

    parser.error = error  # type: ignore[method-assign]


def _hint(word: str, known: Collection[str]) -> str | None:
    """Suggest a flag or choice: by its meaning in other libraries, else by its letters."""
    fields = {flag.lstrip("-").replace("-", "_"): flag for flag in known if flag.startswith("--")}
    if word.startswith("-") and (hint := by_meaning(word, fields, fields.__getitem__)):
        return hint
    return did_you_mean(word, known) if nearest(word, known) else None


def _unknown_names(message: str) -> list[str]:
    _, _, rest = message.partition("unrecognized arguments: ")
    flags = [word.partition("=")[0] for word in rest.split() if word.startswith("-")]
    return flags + re.findall(r"invalid choice: '([^']+)'", message)


def _choices(parser: argparse.ArgumentParser) -> list[str]:
    return [str(choice) for action in parser._actions for choice in action.choices or ()]
