"""Read field annotations: what a type allows, in words and as argparse keywords."""

import types
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from mindspeed.config.suggest import one_of


class CommaSeparated:
    """Mark a tuple field, as in Annotated[tuple[int, ...], CommaSeparated], that is also "0,5"."""


@dataclass(frozen=True)
class Alias:
    """Mark a field, as in Annotated[bool, Alias("old_name")], that is accepted by an old name."""

    name: str


WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Split `X | None` into X and True; anything else into itself and False."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    members = [member for member in get_args(annotation) if member is not type(None)]
    optional = len(members) < len(get_args(annotation))
    return (members[0] if len(members) == 1 else annotation), optional


def element(annotation: Any) -> Any:
    """Return the type of the elements of a list or homogeneous tuple, None for other types."""
    if get_origin(annotation) not in (list, tuple):
        return None
    return get_args(annotation)[0]


def choices(annotation: Any) -> tuple[Any, ...]:
    """Return the values that a Literal allows, nothing for other types."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def split_commas(text: str, item: type) -> tuple[Any, ...]:
    """Split "0,5" into elements of the given type."""
    try:
        return tuple(item(word) for word in text.split(",")) if text.strip() else ()
    except ValueError:
        raise ValueError(f"give {in_words(item)}, or several with commas between") from None


def in_words(annotation: Any) -> str:
    """Say what values an annotation allows."""
    inner, optional = without_none(annotation)
    if values := choices(inner):
        words = one_of(values)
    elif (item := element(inner)) is not None:
        words = f"a list, each element {in_words(item)}"
    else:
        words = WORDS.get(inner, str(inner))
    return f"{words}, or nothing (null)" if optional else words
