"""Flags, YAML and keywords lead to equal objects, for every kind of field."""

import argparse
from typing import Annotated, Literal

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given

from mindspeed.config import (
    Alias,
    CommaSeparated,
    ConfigError,
    Options,
    add_flags,
    add_options,
    build,
    from_namespace,
    load_yaml,
    read_options,
)


class Everything(Options):
    """One field of every kind that options use."""

    off: bool = False
    """A switch that is off."""
    shine: bool = True
    """A switch that is on."""
    level: Literal[0, 1, 2] = 2
    """One of three numbers."""
    algorithm: Literal["ring", "ulysses"] = "ring"
    """One of two words."""
    count: int = 10
    """A whole number."""
    rate: float = 1e-5
    """A number."""
    path: str | None = None
    """Text, or nothing."""
    ranks: tuple[int, ...] = (0,)
    """Several whole numbers."""
    names: tuple[str, ...] | None = None
    """Several words, or nothing."""
    layers: Annotated[tuple[int, ...], CommaSeparated] = ()
    """Several whole numbers with commas."""


integers = st.integers(-(10**9), 10**9)
# A word that argparse would read as a flag, or split, is not a value anybody can give on a command
# line; everything else is.
words = st.text("abcxyz_./=", min_size=1, max_size=8)
values = st.fixed_dictionaries(
    {},
    optional={
        "off": st.booleans(),
        "shine": st.booleans(),
        "level": st.sampled_from([0, 1, 2]),
        "algorithm": st.sampled_from(["ring", "ulysses"]),
        "count": integers,
        "rate": st.floats(allow_nan=False, allow_infinity=False, width=32),
        "path": words,
        "ranks": st.lists(integers, min_size=1, max_size=4),
        "names": st.lists(words, min_size=1, max_size=3),
        "layers": st.lists(st.integers(0, 99), max_size=4),
    },
)


def command_line(given_values):
    words = []
    for field, value in given_values.items():
        flag = "--" + field.replace("_", "-")
        if field == "layers":
            words.append(f"{flag}={','.join(map(str, value))}")
        elif value is True:
            words.append(flag)
        elif value is False:
            words.extend(["--no-shine"] if field == "shine" else [])
        elif isinstance(value, list):
            words.extend([flag, *map(str, value)])
        else:
            words.append(f"{flag}={value}")
    return words


@given(values)
def test_three_front_doors_one_object(tmp_path_factory, given_values):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, Everything)
    from_flags = from_namespace(Everything, parser.parse_args(command_line(given_values)))

    file = tmp_path_factory.getbasetemp() / "options.yaml"
    file.write_text(yaml.safe_dump(given_values))

    from_keywords = build(Everything, given_values)
    assert from_flags == from_keywords == load_yaml(file, Everything)
    assert type(from_flags.rate) is type(from_keywords.rate) is float
    assert hash(from_flags) == hash(from_keywords)


def test_nothing_given_is_the_defaults():
    parser = argparse.ArgumentParser()
    add_flags(parser, Everything)
    assert (
        from_namespace(Everything, parser.parse_args([])) == Everything() == build(Everything, {})
    )


class Renamed(Options):
    """A switch with an old name."""

    fuse_gemm: Annotated[bool | None, Alias("in_product")] = None
    """Fuse."""


@pytest.mark.parametrize("value", [True, False])
def test_an_old_name_is_accepted_through_every_front_door(tmp_path, value):
    file = tmp_path / "options.yaml"
    file.write_text(f"in_product: {str(value).lower()}\n")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, Renamed)
    parsed = parser.parse_args(["--in-product" if value else "--no-in-product"])
    from_keywords = build(Renamed, {"in_product": value})
    assert from_keywords == Renamed(fuse_gemm=value) == load_yaml(file, Renamed)
    assert from_namespace(Renamed, parsed) == from_keywords
    assert from_namespace(Renamed, argparse.Namespace(in_product=value)) == from_keywords
    preset = Renamed(fuse_gemm=not value)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, Renamed, defaults=preset)
    parsed = parser.parse_args(["--in-product" if value else "--no-in-product"])
    assert from_namespace(Renamed, parsed, defaults=preset) == from_keywords


def test_errors_name_the_old_name_where_that_was_given(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("in_product: 3\n")
    with pytest.raises(ConfigError, match="in_product: 3 is not allowed: give true or false"):
        load_yaml(file, Renamed)
    file.write_text("in_product: true\n")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser, Renamed)
    for words, name in (
        (["--in-product"], "in_product"),
        (["--config", str(file)], "in_product"),
        (["--config", str(file), "--fuse-gemm"], "fuse_gemm"),
        (["--no-fuse-gemm"], "fuse_gemm"),
    ):
        options = read_options(parser.parse_args(words), Renamed)
        assert options.name_given("fuse_gemm") == name
        assert options.as_given() == {name: "--no-fuse-gemm" not in words}


@pytest.mark.parametrize("order", [("fuse_gemm", "in_product"), ("in_product", "fuse_gemm")])
def test_both_names_at_once_are_refused(order):
    with pytest.raises(ConfigError) as raised:
        build(Renamed, dict.fromkeys(order, True))
    assert str(raised.value) == (
        "fuse_gemm and its old name in_product are both given: drop in_product"
    )
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, Renamed)
    with pytest.raises(ConfigError, match="are both given"):
        from_namespace(Renamed, parser.parse_args(["--in-product", "--no-fuse-gemm"]))
