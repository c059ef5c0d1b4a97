"""Flags look and behave as Megatron's do."""

import argparse
from typing import Annotated, Literal

import pytest
from pydantic import Field

from mindspeed.config import ConfigError, Options, add_flags, from_namespace, suggest_flags


class Training(Options):
    """A few options."""

    use_fused_swiglu: bool = False
    """Save 17% of the memory
    of an MLP."""
    overlap: bool = True
    """Overlap communication."""
    level: Literal["low", "high"] = "low"
    """How much."""
    seed: int = Field(default=1234, ge=-1)
    """Where random numbers start."""
    rates: tuple[float, ...] = (0.5, 0.25)
    """Learning rates."""
    directory: str | None = None
    """Where to write."""
    tile: Annotated[int, Field(ge=1)] | None = None
    """Rows at a time."""


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(prog="train", allow_abbrev=False)
    add_flags(parser.add_argument_group("mindspeed"), Training)
    suggest_flags(parser)
    return parser


def parse(parser, line):
    return from_namespace(Training, parser.parse_args(line.split()))


def test_help_carries_docstring_choices_and_default(parser):
    text = " ".join(parser.format_help().split())
    assert "--use-fused-swiglu Save 17% of the memory of an MLP." in text
    assert "--overlap, --no-overlap Overlap communication. (default: True)" in text
    assert "--level {low,high} How much. (default: low)" in text
    assert "--seed N Where random numbers start. (default: 1234)" in text
    assert "--rates X [X ...] Learning rates. (default: 0.5 0.25)" in text
    assert "--directory TEXT Where to write." in text
    assert text.endswith("--tile N Rows at a time.")
    assert "mindspeed:" in text


@pytest.mark.parametrize(
    "line, field, value",
    [
        ("--seed -1", "seed", -1),
        ("--seed=-1", "seed", -1),
        ("--no-overlap", "overlap", False),
        ("--rates -0.5 2e-3", "rates", (-0.5, 2e-3)),
        ("--directory=a=b", "directory", "a=b"),
        ("--tile 16", "tile", 16),
    ],
)
def test_values(parser, line, field, value):
    assert getattr(parse(parser, line), field) == value


def test_switch_that_is_off_has_no_negative_flag(parser):
    with pytest.raises(SystemExit):
        parser.parse_args(["--no-use-fused-swiglu"])


def test_existing_flag_stays_the_other_programs():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=7, help="theirs")
    add_flags(parser.add_argument_group("mindspeed"), Training)
    assert "theirs" in parser.format_help()
    assert "random numbers" not in parser.format_help()
    assert from_namespace(Training, parser.parse_args([])).seed == 7


def test_names_that_are_not_ours_are_left_alone(parser):
    namespace = argparse.Namespace(hidden_size=8, seed=3)
    assert from_namespace(Training, namespace) == Training(seed=3)


def test_given_defaults_replace_declared_ones():
    parser = argparse.ArgumentParser()
    before = Training(use_fused_swiglu=True, seed=5)
    add_flags(parser, Training, defaults=before)
    assert from_namespace(Training, parser.parse_args([])) == before
    changed = from_namespace(Training, parser.parse_args(["--no-use-fused-swiglu"]))
    assert changed == Training(use_fused_swiglu=False, seed=5)
    assert from_namespace(Training, argparse.Namespace(), defaults=before) == before


def test_a_refused_value_is_reported_as_a_flag(parser):
    with pytest.raises(ConfigError, match=r"^--seed -9 is not allowed: .*greater.* -1$"):
        parse(parser, "--seed -9")


@pytest.mark.parametrize(
    "line, hint",
    [
        ("--use-fused-swigl", "--use-fused-swigl: did you mean --use-fused-swiglu?"),
        ("--sed=3 --overlp", "--sed: did you mean --seed?; --overlp: did you mean --overlap?"),
        ("--level hihg", "hihg: did you mean high?"),
    ],
)
def test_unknown_word_gets_the_nearest_known_one(parser, capsys, line, hint):
    with pytest.raises(SystemExit) as exit:
        parser.parse_args(line.split())
    assert exit.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(hint)


def test_a_value_of_another_type_is_named_by_the_type(parser, capsys):
    with pytest.raises(SystemExit):
        parse(parser, "--tile many")
    assert "argument --tile: invalid int value: 'many'" in capsys.readouterr().err


def test_an_unknown_flag_without_a_near_one_is_a_one_line_error(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--qqqqqqqq"])
    assert capsys.readouterr().err == (
        f"{parser.prog}: error: unrecognized arguments: --qqqqqqqq; --help lists what there is\n"
    )


class Empty(Options):
    """One option whose default is no text."""

    folder: str = ""
    """Where to read."""


def test_a_default_that_is_no_text_is_not_shown():
    parser = argparse.ArgumentParser(prog="train")
    add_flags(parser, Empty)
    assert "--folder TEXT" in parser.format_help() and "default" not in parser.format_help()


class Required(Options):
    """One option without a default."""

    source: str
    """Where to read."""


def test_a_flag_without_a_default_is_reported_as_missing():
    parser = argparse.ArgumentParser(prog="train")
    add_flags(parser, Required)
    assert from_namespace(Required, parser.parse_args(["--source", "here"])).source == "here"
    with pytest.raises(ConfigError, match="^--source is missing$"):
        from_namespace(Required, parser.parse_args([]))
    assert "SUPPRESS" not in parser.format_help()
