"""Everything that the page on conversion shows is run, and answers what the page says."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mindspeed.config import add_flags
from mindspeed_llm.checkpoint import ConvertOptions
from mindspeed_llm.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/llm/convert.md").read_text()
NAME = "SmolLM2-135M-Instruct"


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def without_sizes(text):
    return re.sub(r"\d+\.\d+ (GB|s)\b", r"? \1", text)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the shell commands of the page have been run on a model like SmolLM2."""
    import transformers

    folder = tmp_path_factory.mktemp("page")
    config = transformers.LlamaConfig(
        hidden_size=36,
        intermediate_size=48,
        vocab_size=128,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / NAME)
    (folder / NAME / "tokenizer.json").write_text("{}")
    (folder / "convert_ckpt.py").symlink_to(ROOT / "convert_ckpt.py")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = "set -e\n" + "\n".join(blocks("bash"))
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (folder / "shown.txt").write_text(done.stdout)
    return folder


def test_shell_commands_print_what_is_shown(place):
    shown = without_sizes((place / "shown.txt").read_text())
    assert len(blocks("text")) == 2
    for block in blocks("text"):
        assert without_sizes(block) in shown


def test_back_is_bit_equal(place):
    expected = load_file(place / NAME / "model.safetensors")
    found = load_file(place / "exported" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert len(list((place / "resharded").rglob("model_optim_rng.pt"))) == 3


def test_yaml_and_python(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    (place / "convert.yaml").write_text(*blocks("yaml"))
    assert main(["convert", "--config", "convert.yaml", "--params-dtype", "fp16"]) == 0
    ranks = sorted((place / "mcore_uneven").rglob("model_optim_rng.pt"))
    models = [torch.load(path, weights_only=True)["model"] for path in ranks]
    layers = [{name.split(".")[2] for name in m if "layers" in name} for m in models]
    assert [len(numbers) for numbers in layers] == [11, 19]
    assert models[0]["embedding.word_embeddings.weight"].dtype == torch.float16
    capsys.readouterr()
    exec(*blocks("python"), {})
    assert capsys.readouterr().out == "llama 1 bfloat16\n"


def refusals():
    lines = iter("".join(blocks("console")).splitlines())
    return list(zip(lines, lines))


@pytest.mark.parametrize("command, answer", refusals())
def test_refusals(place, monkeypatch, capsys, command, answer):
    monkeypatch.chdir(place)
    assert main(shlex.split(command)[2:]) == 2
    assert capsys.readouterr().err == answer + "\n"
    assert not (place / "out").exists()


def test_every_flag_is_explained_as_in_the_help():
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, ConvertOptions)
    for action in parser._actions:
        help_text = action.help.replace("%%", "%")
        assert f"| `{action.option_strings[0]}` | {help_text} |\n" in PAGE
