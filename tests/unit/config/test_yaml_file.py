"""A YAML file is read strictly, and what is wrong in it is one line."""

import argparse
from typing import Annotated, Literal

import pytest

from mindspeed.config import (
    CommaSeparated,
    ConfigError,
    Options,
    add_options,
    load_yaml,
    read_options,
)


class Training(Options):
    """A few options."""

    rate: float = 0.1
    """Learning rate."""
    level: Literal[0, 1, 2] = 2
    """Level."""
    fused: bool = False
    """A switch."""
    steps: int = 10
    """Steps."""
    layers: Annotated[tuple[int, ...], CommaSeparated] = ()
    """Layers."""


BOMB = "a0: &a0 [1, 2]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{i}: &a{i}\n  <<: [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)
)


@pytest.fixture
def load(tmp_path):
    def load(text):
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return load_yaml(file, Training)

    return load


@pytest.mark.parametrize(
    "text, rate",
    [
        ("rate: 1e-5", 1e-5),
        ("rate: -3E+2", -300.0),
        ("rate: 1.5e3", 1500.0),
        ("rate: .5e1", 5.0),
        ("rate: 2", 2.0),
    ],
)
def test_numbers(load, text, rate):
    assert load(text).rate == rate


@pytest.mark.parametrize("text", ["layers: '0,5'", "layers: 0,5", "layers: [0, 5]"])
def test_list_in_both_spellings(load, text):
    assert load(text).layers == (0, 5)


def test_tabs_behind_a_value_are_nothing(load):
    text = "rate: 2\t\nlayers: \t\n- 0 \t \n- 5\n"
    assert load(text) == load(text.replace("\n", "\r\n")) == Training(rate=2.0, layers=(0, 5))


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n"])
def test_empty_file_is_the_defaults(load, text):
    assert load(text) == Training()


@pytest.mark.parametrize(
    "text, message",
    [
        ("levl: 1", "unknown key levl: 1; did you mean level?"),
        ("qqq: 1", "unknown key qqq: 1; known: fused, layers, level, rate, steps"),
        ("level: 3", "level: 3 is not allowed: give 0, 1 or 2"),
        ("level: true", "level: true is not allowed: give 0, 1 or 2"),
        ("fused: 1", "fused: 1 is not allowed: give true or false"),
        ("steps: 1.5", "steps: 1.5 is not allowed: give a whole number"),
        ("steps: '3'", "steps: 3 is not allowed: give a whole number"),
        ("steps: true", "steps: true is not allowed: give a whole number"),
        ("steps:", "steps: null is not allowed: give a whole number"),
        ("rate: fast", "rate: fast is not allowed: give a number"),
        ("layers: [1, x]", "layers holds x, which is not allowed: give a list"),
        ("layers: 1,x", "layers: 1,x is not allowed: give a whole number, or several"),
        ("rate: 1\nrate: 2", "not valid YAML: line 2, column 1: the key rate is given twice"),
        ("rate: [", "not valid YAML: line 1"),
        ("- rate", "holds a list: give lines of `key: value`"),
        ("5", "holds a number: give lines of `key: value`"),
        ("a: " + "[" * 9000, "line 1, column 53: it is nested deeper than 50 levels"),
        ("".join(f"{' ' * i}k:\n" for i in range(500)), "it is nested deeper than 50 levels"),
        (BOMB, "it holds more than 100,000 values"),
        (MERGES, "it holds more than 100,000 values"),
        ("a: &a [*a]", "line 1, column 8: the alias a stands in its own value"),
        ("? [rate, steps]\n: 1", "line 1, column 3: a key must be text or a number"),
        ("? {rate: 1}\n: 1", "line 1, column 3: a key must be text or a number"),
        ("rate: 2024-13-45", "line 1, column 7: '2024-13-45' is not a valid timestamp"),
        ("steps: !!int many", "line 1, column 8: 'many' is not a valid int"),
        ("steps: " + "9" * 5000, "is not a valid int"),
        ("fused: !!bool perhaps", "'perhaps' is not a valid bool"),
        ('rate: "\\ud800"', "is not a valid str"),
        ("rate: " + "x" * (1 << 20), "is larger than 1 MiB"),
        ("rate: " + "x" * 5000, "rate: " + "x" * 77 + "... is not allowed: give a number"),
        ("rate: [1, 2]\nsteps: {a: 'b\n\n  c'}", "steps: {'a': 'b\\nc'} is not allowed"),
        ("!!python/object/apply:os.getcwd []", "not valid YAML: line 1"),
    ],
    ids=lambda text: text[:24],
)
def test_wrong_file_is_one_clear_line(load, tmp_path, text, message):
    with pytest.raises(ConfigError) as raised:
        load(text)
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path / 'run.yaml'}: ")
    assert "\n" not in str(raised.value)


def test_aliases_and_merges_are_served(load):
    assert load("&all {rate: 3, steps: 5}\n") == Training(rate=3.0, steps=5)
    assert load("layers: &two [1, 2]\nsteps: 4") == Training(layers=(1, 2), steps=4)
    assert load("<<: {rate: 3}\nsteps: &n 2\nlevel: *n") == Training(rate=3.0, steps=2, level=2)


def test_every_problem_is_reported(load):
    with pytest.raises(ConfigError, match="level: 7 .*steps: x .*unknown key stps"):
        load("level: 7\nsteps: x\nstps: 1")


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot be read .*No such file"):
        load_yaml(tmp_path / "nowhere.yaml", Training)
    with pytest.raises(ConfigError, match="cannot be read .*directory"):
        load_yaml(tmp_path, Training)


def test_binary_file(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="weights.bin: cannot be read"):
        load_yaml(tmp_path / "weights.bin", Training)


class Optional(Options):
    """Options that may be nothing and are something by default."""

    interval: int | None = 100
    """Steps, or never."""
    tags: tuple[str, ...] | None = ("a", "b")
    """Words, or none."""
    name: str | None = None
    """A name."""


@pytest.mark.parametrize("is_flag", [False, True])
def test_null_is_a_value_not_the_default(tmp_path, is_flag):
    file = tmp_path / "run.yaml"
    file.write_text("interval: null\ntags:\n")
    assert load_yaml(file, Optional) == Optional(interval=None, tags=None)
    parser = argparse.ArgumentParser()
    add_options(parser, Optional)
    namespace = parser.parse_args(["--config", str(file), *(["--interval", "7"] * is_flag)])
    found = read_options(namespace, Optional)
    assert found == Optional(interval=7 if is_flag else None, tags=None)
    assert read_options(parser.parse_args([]), Optional) == Optional()
