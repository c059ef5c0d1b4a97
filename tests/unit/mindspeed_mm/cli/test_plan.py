"""`mindspeed-mm plan` on small models: its output and its errors."""

import json
import sys

import pytest
import torch
import yaml

from mindspeed_mm.cli.main import main
from mindspeed_mm.models.meta_device import build_meta_model

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
FILE = """\
model: {model}
sharding_size: 2
sub_modules_to_wrap: ["model.layers.{{*}}", lm_head]
recompute_modules: ["model.layers.{{0-1}}"]
ignored_modules: [model.embed_tokens]
num_to_forward_prefetch: 2
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "fsdp2_config.yaml").write_text(FILE.format(model=tmp_path))
    return tmp_path


def test_the_plan_of_a_hugging_face_folder(folder, capsys):
    assert main(["plan", str(folder / "fsdp2_config.yaml"), "--ranks", "4"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    # 16 x 16 and two 16 x 8 with biases, 16 x 16, three 16 x 24, two norms
    layer = 16 * 16 + 16 + 2 * (16 * 8 + 8) + 16 * 16 + 3 * 16 * 24 + 2 * 16
    kept = f"{layer * 4 / 2 / 1024:.2f}"
    assert [
        "{0-1}:",
        "Qwen2DecoderLayer",
        "sharded,",
        "recomputed",
        f"{layer:,}",
        kept,
        "KiB",
    ] in rows
    assert ["2:", "Qwen2DecoderLayer", "sharded", f"{layer:,}", kept, "KiB"] in rows
    assert ["embed_tokens:", "Embedding", "ignored", "1,024", "4.00", "KiB"] in rows
    assert ["lm_head:", "Linear", "sharded", "1,024", "2.00", "KiB"] in rows
    assert "mesh 2 x 2 (replicas x shards)".split() in rows
    assert "all-gather order model.layers.{0-2}, lm_head".split() in rows
    assert "prefetch 2 forward, 1 backward".split() in rows
    total = 64 * 16 * 4 + (3 * layer + 64 * 16 + 16) * 2
    assert (
        f"memory per rank weights {total / 1024:.2f} KiB, gradients".split()
        == next(row for row in rows if row[:3] == ["memory", "per", "rank"])[:7]
    )
    assert ["must", "be", "frozen", "model.embed_tokens.weight"] in rows


def test_a_function_is_found_where_the_command_is_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_little_model.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(4, 6))\n"
    )
    (tmp_path / "c.yaml").write_text("sharding_size: auto\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert main(["plan", "c.yaml", "--model", "my_little_model:build", "--ranks", "2"]) == 0
    assert "(root): Sequential  sharded          30            60 B" in capsys.readouterr().out


def test_a_meta_model_has_no_weights(folder):
    parameters = list(build_meta_model(str(folder)).parameters())
    assert parameters and all(parameter.is_meta for parameter in parameters)
    assert torch.empty(0).device.type == "cpu"


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (
            "sub_modules_to_wrap: ['model.layer.{*}']",
            [],
            "model has no layer; did you mean layers?",
        ),
        ("sub_modules_to_wrapp: []", [], "did you mean sub_modules_to_wrap?"),
        ("sharding_size: 3", ["--ranks", "4"], "does not divide 4 rank(s): use 1, 2, 4"),
        ("", ["--ranks", "0"], "--ranks 0 is too small"),
        ("", ["--model", "no_such_module:f"], "no_such_module cannot be imported"),
        ("", ["--model", "json:dump_"], "json has no function dump_; did you mean dump?"),
        ("", ["--model", "builtins:dict"], "it has to return a torch.nn.Module"),
        (
            "",
            ["--model", "torch.nn:Linear"],
            "called without arguments, but has a missing",
        ),
        ("", ["--model", "nowhere"], "give a Hugging Face folder, or package.module:function"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(folder, capsys, text, flags, message):
    path = folder / "other.yaml"
    path.write_text(f"model: {folder}\n{text}\n")
    assert main(["plan", str(path), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_file_without_a_model_names_the_missing_key(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("")
    assert main(["plan", str(path)]) == 2
    assert "names no model: add `model: ...` or give --model" in capsys.readouterr().err


def test_an_unknown_architecture_is_named(folder, capsys):
    (folder / "config.json").write_text(json.dumps({**QWEN, "architectures": ["Qwen9"]}))
    assert main(["plan", str(folder / "fsdp2_config.yaml")]) == 2
    assert "has no Qwen9" in capsys.readouterr().err


def test_a_config_that_cannot_be_built_is_one_line(folder, capsys):
    (folder / "config.json").write_text(json.dumps({**QWEN, "layer_types": ["full_attention"]}))
    assert main(["plan", str(folder / "fsdp2_config.yaml")]) == 2
    error = capsys.readouterr().err
    assert "config.json: " in error and error.count("\n") == 1


def test_the_file_of_a_run_is_planned_as_it_will_be_trained(folder, capsys):
    """With its frozen parts, adapters and types."""
    run = {
        "model": {"init_from_hf_path": str(folder), "lora": {"r": 2, "target_modules": ["q_proj"]}},
        "fsdp2_config": {"sharding_size": "auto", "sub_modules_to_wrap": ["model.layers.{*}"]},
        "training": {"bf16": True, "lr": 1e-3},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["plan", str(folder / "run.yaml"), "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    adapters = 3 * 2 * (16 + 16)  # three layers, each 2 x 16 and 16 x 2
    assert f"gradients {adapters * 4 // 2} B," in out
    assert "compute bf16, reduce fp32" in out
    (folder / "run.yaml").write_text(yaml.safe_dump(run | {"fsdp2_confg": {}}))
    assert main(["plan", str(folder / "run.yaml")]) == 2
    assert "did you mean fsdp2_config?" in capsys.readouterr().err
