"""Options of an evaluation are checked before anything is loaded."""

import importlib.metadata

import pytest

from mindspeed_llm.cli.main import main

LOAD = ["evaluate", "--load", "somewhere"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["evaluate", "--tasks", "x"], "--load is missing"),
        (LOAD, "--tasks is missing: give names of tasks, or .yaml files"),
        ([*LOAD, "--tasks", "x", "--limit", "0"], "--limit 0 is too small: give 1 or more"),
        ([*LOAD, "--tasks", "x", "--num-fewshot", "-1"], "--num-fewshot -1 is too small"),
        ([*LOAD, "--tasks", "x", "--output", "/no/such/a.json"], "--output /no/such/a.json: give"),
        ([*LOAD, "--tasks", "x", "--bf16", "--fp16"], "--bf16 and --fp16"),
        ([*LOAD, "--tasks", "x", "--output", "a", "--samples", "./a"], "are both a: give two"),
        ([*LOAD, "--task", "x"], "--task"),
    ],
)
def test_invalid_options(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(flags))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("version", [None, "0.4.9"])
def test_the_harness_is_asked_for(monkeypatch, capsys, version):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert main([*LOAD, "--tasks", "x"]) == 2
    found = f"{version} is installed" if version else "it is not installed"
    message = f"mindspeed-llm evaluate needs lm_eval>=0.4.13,<0.5, {found}: pip install"
    assert message in capsys.readouterr().err
