"""Damaged files, values and command lines, drawn by hypothesis, and how a command has to end."""

import argparse
import contextlib
import copy
import io
import json
import time
from dataclasses import dataclass

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed_llm.cli.main import main
from tests.budget import examples

SECONDS = 20
TOKENS = (
    b"\x00",
    b"\xff\xfe",
    b'"',
    b"'",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\n",
    b"-",
    b"9",
)
TOKENS += (
    b"\\u",
    b"1e999",
    b"null",
    b"&a",
    b"*a",
    b"!!python/object",
    b"\xed\xa0\x80",
    b" " * 40,
)
ODD = (None, True, -1, 0, 1.5, 10**12, 10**400, float("nan"), float("inf"), "", "x", "\0", "../x")
ODD += ([], [1], ["x", {}], {}, {"a": 1}, [[[[]]]])
VALUES = [
    "1",
    "2",
    "0",
    "-1",
    "x",
    "",
    "1e9",
    "99999999999999999999",
    "true",
    "1,2",
    "{",
    "/",
    "\0",
]
VALUES += ["/nowhere", "qwen", "AlpacaStyleInstructionHandler", "hf", "mg", "bf16", "llama2", "é"]
"""What may follow a flag."""
KEPT = ("save_dir", "output_prefix", "cache_dir", "tokenizer_name_or_path")
"""Options that mutants of a YAML file leave alone: they say where to write, or take seconds."""


def mutants(multiple=1):
    """Return settings: a multiple of the profile's examples, the same ones every time."""
    return settings(
        max_examples=examples(multiple),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def damaged(draw, content, end=None):
    """Cut, change, repeat or insert a few bytes, before `end` if it is given."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, min(len(data), end or len(data))))
        size = draw(st.sampled_from([0, 1, 2, 7, 50, 1000]))
        kind = draw(st.sampled_from(["delete", "insert", "replace", "flip", "repeat", "cut"]))
        if kind == "delete":
            del data[position : position + size]
        elif kind == "insert":
            data[position:position] = draw(st.sampled_from(TOKENS) | st.binary(max_size=9))
        elif kind == "replace":
            data[position : position + size] = draw(st.sampled_from(TOKENS))
        elif kind == "flip" and position < len(data):
            data[position] ^= 1 << draw(st.integers(0, 7))
        elif kind == "repeat":
            data[position:position] = data[position : position + size] * 2
        elif kind == "cut" and draw(st.integers(0, 3)) == 0:
            del data[position:]
    return bytes(data)


@st.composite
def changed(draw, value):
    """Put an odd value into a structure of dictionaries and lists, or take one out."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        holder = value
        while True:
            keys = sorted(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(holder[key], (dict, list)) and draw(st.booleans()):
                holder = holder[key]
                continue
            kind = draw(st.sampled_from(["odd", "odd", "delete", "other"]))
            if kind == "delete":
                del holder[key]
            else:
                others = [holder[k] for k in keys]
                chosen = draw(st.sampled_from(ODD if kind == "odd" else others))
                holder[key] = copy.deepcopy(chosen)
            break
    return value


@st.composite
def flags(draw, known, values):
    """Draw flags of a command, known and misspelt, with good and odd values."""
    arguments = []
    for name in draw(st.lists(st.sampled_from(sorted(known)), max_size=4)):
        argument = name if draw(st.integers(0, 5)) else name[:-1]
        arguments.append(argument)
        if known[name] and draw(st.integers(0, 7)):
            arguments.append(draw(st.sampled_from(values)))
    return arguments


@dataclass
class End:
    """How a command ended."""

    code: int
    out: str
    error: str
    """The line without what stands before the message."""


def run(*arguments):
    """Run a command in this process; it must end soon, well or with one clear line."""
    out, err, started = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(map(str, arguments)))
        except SystemExit as exit:  # argparse's own: a line of usage, and the error
            code = exit.code
    assert time.process_time() - started < SECONDS  # not of a machine that others keep busy
    lines = err.getvalue().splitlines()
    errors = [line for line in lines if ": error: " in line]
    assert code in (0, 2) and len(errors) == (code == 2), (code, err.getvalue())
    assert "Traceback" not in err.getvalue()
    if errors:
        assert lines[-1] is errors[0], "something stands behind the error"
        assert len(errors[0]) < 2000 and errors[0].isprintable()
    return End(code, out.getvalue(), errors[0].partition(": error: ")[2] if errors else "")


def check_yaml(values, path, command, check_end):
    """Run a command with mutants of a YAML file, and check the end of each."""
    kept = {key: value for key, value in values.items() if key in KEPT}
    other = {key: value for key, value in values.items() if key not in KEPT}
    odd = changed(other).map(yaml.safe_dump).map(str.encode)

    @mutants()
    @given(odd | damaged(yaml.safe_dump(other).encode()))
    def check(content):
        path.write_bytes(yaml.safe_dump(kept).encode() + content)
        check_end(run(command, "--config", path))

    check()


def known_flags(command):
    """Return every flag of a command, and whether a value follows it.

    Without those that say where to write, and what takes seconds to read.
    """
    parser = command.add_parser(argparse.ArgumentParser().add_subparsers())
    actions = [action for action in parser._actions if action.dest != "help"]
    found = {a.option_strings[0]: a.nargs != 0 for a in actions if a.option_strings}
    excluded = {"--output-prefix", "--save-dir", "--cache-dir", "--tokenizer-name-or-path"}
    excluded.add("--trust-remote-code")  # reads the tokenizer again
    return {name: has_value for name, has_value in found.items() if name not in excluded}


def as_json(value):
    """Return the bytes of a file."""
    return json.dumps(value).encode()
