"""Keyword arguments: strict, immutable, and named in errors as the user wrote them."""

from typing import Literal

import pytest
from pydantic import ValidationError, field_validator, model_validator

from mindspeed.config import ConfigError, Options, Spelling, build, printable


class Window(Options):
    """A few options."""

    size: int = 1
    """Size."""
    names: tuple[str, ...] = ()
    """Names."""

    @field_validator("size")
    @classmethod
    def _is_odd(cls, size: int) -> int:
        if size % 2 == 0:
            raise ConfigError("use an odd number")
        return size

    @model_validator(mode="after")
    def _fits(self) -> "Window":
        if len(self.names) > self.size:
            raise ValueError(f"{len(self.names)} names do not fit in size={self.size}")
        return self


@pytest.mark.parametrize(
    "values, message",
    [
        ({"size": 2}, "size=2 is not allowed: use an odd number"),
        ({"size": "1"}, "size='1' is not allowed: give a whole number"),
        ({"names": ("a", "b")}, "2 names do not fit in size=1"),
        ({"names": "a"}, "names='a' is not allowed: give a list, each element text"),
        ({"sizes": 1}, "unknown option sizes=1; did you mean size?"),
    ],
)
def test_wrong_keywords(values, message):
    with pytest.raises(ConfigError) as raised:
        build(Window, values)
    assert str(raised.value) == message


def test_spelling_of_flags():
    with pytest.raises(ConfigError, match=r"^--size 2 is not allowed: use an odd number$"):
        build(Window, {"size": 2}, Spelling.FLAG)


def test_options_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Window().size = 3


def test_a_list_is_taken_for_a_tuple():
    assert build(Window, {"size": 3, "names": ["a"]}).names == ("a",)


class House(Options):
    """Options with a section of their own."""

    window: Window = Window()
    """The window."""
    door: Window | None = None
    """The door."""


@pytest.mark.parametrize(
    "values, message",
    [
        ({"window": {"sise": 1}}, "unknown option window.sise=1; did you mean size?"),
        ({"door": {"size": "1"}}, "door.size='1' is not allowed: give a whole number"),
        ({"window": 3}, "window: give keys and values, of size, names"),
        ({"window": {"names": ["a", "b"]}}, "window: 2 names do not fit in size=1"),
        ({"door": {"names": [1]}}, "door.names holds 1, which is not allowed: give a list, each"),
    ],
)
def test_sections_are_reported_by_their_path(values, message):
    with pytest.raises(ConfigError) as error:
        build(House, values)
    assert str(error.value).startswith(message)


class Fixed(Options):
    """A switch of which only one side is served, and a number."""

    is_fast: Literal[True] | None = None
    """Only true."""
    level: Literal[0, 1] = 0
    """A number, which true is not."""


def test_the_one_value_of_a_switch_can_be_given():
    assert build(Fixed, {"is_fast": True}).is_fast is True
    for wrong in ({"is_fast": False}, {"level": True}):
        with pytest.raises(ConfigError, match="is not allowed"):
            build(Fixed, wrong)


def test_an_error_of_several_lines_is_printed_as_one():
    assert printable("first:\n  second\r\n\tthird \x1b[0m\n") == "first: second third \\x1b[0m"
