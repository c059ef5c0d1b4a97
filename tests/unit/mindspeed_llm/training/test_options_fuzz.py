"""Hundreds of damaged command lines and YAML files for training: options, or one clear line."""

import argparse
import contextlib
import io
from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.config import ConfigError, printable
from mindspeed_llm.training.options import add_arguments, parse
from tests.llm.mutants import changed, damaged, flags, mutants

GOOD = {
    "load": "model",
    "data_path": ["0.3", "one", "0.7", "two"],
    "save": "saved",
    "train_iters": 100,
    "global_batch_size": 8,
    "lr": 1e-5,
    "lr_decay_style": "WSD",
    "lr_warmup_fraction": 0.03,
    "split": "98,2,0",
    "bf16": True,
    "tensor_model_parallel_size": 2,
    "lora_r": 8,
    "lora_target_modules": ["linear_qkv"],
}
FLAGS = "--load model --data-path one --lr 1e-5 --train-iters 10".split()
VALUES = ["1", "0", "-1", "x", "", "1e9", "nan", "inf", "-1e-5", "1.5", "99999999999999999999"]
VALUES += ["true", "1,2", "100,0,0", "{", "\0", "é", "sft", "cosine", "0.5", "0.5 one", "full"]


def end(*argv: str) -> str:
    """Read a command line; return what is wrong with it, in one line, or nothing."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parse(argv)
    except SystemExit as exit:  # argparse's own: one line
        assert exit.code == 2
        text = errors.getvalue().rpartition(": error: ")[2].strip()
    except ConfigError as error:
        text = printable(str(error))
    else:
        return ""
    assert text.isprintable() and 10 < len(text) < 2000, text
    return text


def test_flags() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    known = {
        word: action.nargs != 0
        for action in parser._actions
        for word in action.option_strings
        if word.startswith("--") and word not in ("--help", "--config")
    }
    errors = set()

    @mutants(8)
    @given(flags(known, VALUES))
    def check(words: list[str]) -> None:
        errors.add(end(*FLAGS, *words))

    check()
    # Many flags are switches, which have no value that could be refused in a way of its own.
    assert len(errors) > 80, "hardly any of them was refused"


def test_yaml(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    plain = yaml.safe_dump(GOOD).encode()
    odd = changed(GOOD).map(lambda values: yaml.safe_dump(values).encode())
    errors = set()

    @mutants(8)
    @given(st.one_of(odd, damaged(plain)))
    def check(content: bytes) -> None:
        file.write_bytes(content)
        errors.add(end("--config", str(file)))

    file.write_bytes(plain)
    assert end("--config", str(file)) == ""
    check()
    assert len(errors) > 100, "hardly any of them was refused"
