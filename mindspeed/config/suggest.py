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
    same_kind = [one for one in known if one.startswith("--") == word.startswith("-")]
    return did_you_mean(word, same_kind) if nearest(word, same_kind) else None


def _unknown_names(message: str) -> list[str]:
    _, _, rest = message.partition("unrecognized arguments: ")
    flags = [word.partition("=")[0] for word in rest.split() if word.startswith("-")]
    return flags + re.findall(r"invalid choice: '([^']+)'", message)


def _choices(parser: argparse.ArgumentParser) -> list[str]:
    return [str(choice) for action in parser._actions for choice in action.choices or ()]
