"""The pattern language for module paths: dotted names whose parts may hold braces.

{*} is any name, {0-23} a range with both ends, {1,3,5} a list, {0-3,7} a mixture.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from mindspeed.config import ConfigError, did_you_mean

Children = Mapping[str, Sequence[str]]
"""The names of the children of every module, by the path of the module."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_ITEM = re.compile(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?")
_WIDEST = 10_000
"""The longest range that is accepted."""


class Pattern:
    """One path with braces."""

    def __init__(self, text: str) -> None:
        """Parse a pattern; ConfigError if it is malformed."""
        self.text = text
        self._parts = [_Part(part, text) for part in _split(text)]

    def match(self, children: Children) -> list[str]:
        """Return the paths that match; none, or a number without a module, is a ConfigError."""
        paths = [""]
        for part in self._parts:
            found = [(path, name) for path in paths for name in children[path] if part.fits(name)]
            known = [name for path in paths for name in children[path]]
            if not found:
                missing_name = f"{_format(paths)} has no {part.text}"
                hint = did_you_mean(part.text, known) if known else "it has no submodules"
                raise ConfigError(f"{self.text} matches no module: {missing_name}; {hint}")
            if missing := part.missing(name for _, name in found):
                raise ConfigError(
                    f"{self.text}: {_format(paths)} has no {_as_ranges(missing)}, "
                    f"only {', '.join(fold(dict.fromkeys(known)))}"
                )
            paths = [_join(path, name) for path, name in found]
        return paths


class _Part:
    """The text between two dots: a name with any number of braces in it."""

    def __init__(self, text: str, whole: str) -> None:
        self.text = text
        if "{" in _BRACES.sub("", text) or "}" in _BRACES.sub("", text):
            raise ConfigError(f"{whole}: unbalanced braces")
        if not text:
            raise ConfigError(f"{whole}: empty name between or beside dots")
        literals = _BRACES.split(text)[::2]
        insides = _BRACES.findall(text)
        self._choices = [_numbers(inside, whole) for inside in insides]
        pieces = [re.escape(literals[0])]
        for choice, literal in zip(self._choices, literals[1:]):
            group = ".+" if choice is None else "|".join(map(str, sorted(choice)))
            pieces += [f"({group})", re.escape(literal)]
        self._regex = re.compile("".join(pieces))

    def fits(self, name: str) -> bool:
        """Return whether the name of a module matches."""
        return self._regex.fullmatch(name) is not None

    def missing(self, names: Iterable[str]) -> set[int]:
        """Return the numbers of the pattern that no name has."""
        matches = [match for name in names if (match := self._regex.fullmatch(name))]
        return {
            number
            for group, choice in enumerate(self._choices, start=1)
            if choice is not None
            for number in choice - {int(match[group]) for match in matches}
        }


def child_names(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the children of every path; the paths are those of named_modules."""
    children: dict[str, list[str]] = {}
    for path in paths:
        children.setdefault(path, [])
        if path:
            parent, _, name = path.rpartition(".")
            children.setdefault(parent, []).append(name)
    return children


def fold(paths: Iterable[str]) -> list[str]:
    """Fold paths that differ in their first number into one pattern, in order of appearance."""
    numbers: dict[tuple[str, str | None], list[int]] = {}
    for path in paths:
        parts = path.split(".")
        index = next((i for i, part in enumerate(parts) if _is_number(part)), None)
        if index is None:
            numbers[path, None] = []
        else:
            key = (".".join([*parts[:index], ""]), ".".join(["", *parts[index + 1 :]]))
            numbers.setdefault(key, []).append(int(parts[index]))
    return [
        start if end is None else f"{start}{_braces(found)}{end}"
        for (start, end), found in numbers.items()
    ]


def _split(text: str) -> list[str]:
    return text.split(".") if text else []


def _numbers(inside: str, whole: str) -> frozenset[int] | None:
    """Return the numbers of one pair of braces, None for the star."""
    if inside.strip() == "*":
        return None
    numbers: set[int] = set()
    for item in inside.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise ConfigError(
                f"{whole}: {{{inside}}} contains {item.strip() or 'nothing'!r}: "
                "give *, a number, or a range like 0-23"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"{whole}: {first}-{last} is descending: write {last}-{first}")
        if last - first >= _WIDEST:
            raise ConfigError(f"{whole}: {first}-{last} is too long: at most {_WIDEST} modules")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and str(int(text)) == text


def _braces(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{{{_as_ranges(numbers)}}}"


def _as_ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _format(paths: Sequence[str]) -> str:
    return ", ".join(fold(paths)) if paths != [""] else "the model"
