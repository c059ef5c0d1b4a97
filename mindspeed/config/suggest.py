"""Nearest names for what was mistyped."""

import argparse
import difflib
import re
from collections.abc import Collection, Iterable
from typing import NoReturn

from mindspeed.config.errors import printable
from mindspeed.config.synonyms import by_meaning

LISTED = 20
"""How many known names an error lists; of more, only one that is near."""
SIMILAR, SHORT_NAME, SIMILAR_IF_SHORT = 0.75, 5, 0.66
"""The share of letters in common that makes names near; in a short one a slip weighs more."""
SIMILAR_WITH_COMMON_WORDS = 0.6
MISSPELT, MISSPELT_WORD = 0.9, 0.6
"""The share of letters of a misspelt name, and of each of its words, that are right."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most like `name`, or None when nothing is near.

    Near are a slip of the keys, and a name with words left out or added: layers, num-layers.
    """
    known = {_plain(candidate): candidate for candidate in candidates}
    typed = _plain(name)
    found = _most_similar(typed, known, SIMILAR if len(typed) >= SHORT_NAME else SIMILAR_IF_SHORT)
    if found is None:
        words = set(typed.split("-"))
        related = [n for n in known if (w := set(n.split("-"))) <= words or w >= words]
        found = _most_similar(typed, related, SIMILAR_WITH_COMMON_WORDS)
    return None if found is None else known[found]


def misspelt(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that `name` is a slip of the keys away from, or None.

    Stricter than `nearest`, for names that may well be other projects' own: the words are the same
    but for letters, or only what stands between them differs.
    """
    known = {_plain(candidate): candidate for candidate in candidates}
    typed = _plain(name)
    for near in difflib.get_close_matches(typed, known, n=3, cutoff=MISSPELT):
        pairs = list(zip(words := typed.split("-"), others := near.split("-")))
        same_words = len(words) == len(others) and all(_ratio(*p) >= MISSPELT_WORD for p in pairs)
        if same_words or typed.replace("-", "") == near.replace("-", ""):
            return known[near]
    return None


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _most_similar(name: str, candidates: Iterable[str], cutoff: float) -> str | None:
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return "did you mean x?", or the known names when nothing is near."""
    known = sorted(set(candidates))
    match = nearest(name, known)
    if match is not None:
        return f"did you mean {match}?"
    if len(known) > LISTED:
        return f"none of the {len(known)} known names is similar"
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
        flags, choices = set(parser._option_string_actions), _choices(parser, message)
        hints = [f"{word}: {hint}" for word in _flags(message) if (hint := _hint(word, flags))]
        for word in re.findall(r"invalid choice: '([^']+)'", message):
            hints += [f"{word}: {did_you_mean(word, choices)}"] if nearest(word, choices) else []
        text = "; ".join([message, *dict.fromkeys(hints or ["--help lists what there is"])])
        parser.exit(2, f"{parser.prog}: error: {printable(text)}\n")

    parser.error = error  # type: ignore[method-assign]


def _hint(word: str, flags: Collection[str]) -> str | None:
    """Suggest a flag: by its meaning in other libraries, else by its letters."""
    fields = {flag.lstrip("-").replace("-", "_"): flag for flag in flags if flag.startswith("--")}
    if hint := by_meaning(word, fields, fields.__getitem__):
        return hint
    return did_you_mean(word, fields.values()) if nearest(word, fields.values()) else None


def _flags(message: str) -> list[str]:
    """Return the flags that a message says are not known."""
    _, _, rest = message.partition("unrecognized arguments: ")
    return [word.partition("=")[0] for word in rest.split() if word.startswith("-")]


def _choices(parser: argparse.ArgumentParser, message: str) -> list[str]:
    """Return the choices of the argument that a message is about."""
    named = re.match(r"argument ([^:]+):", message)
    names = set(re.split(r"[/, ]+", named[1])) if named else set()
    return [
        str(choice)
        for action in parser._actions
        if names & {*action.option_strings, action.dest, str(action.metavar)}
        for choice in action.choices or ()
    ]
