"""`mindspeed-llm import-gguf` with files that it cannot read: one line, and nothing is written."""

import json

import pytest

from mindspeed_llm.cli.main import main
from tests.llm.smollm2 import smollm2_file


@pytest.mark.parametrize(
    "content, expected",
    [
        (None, "cannot be read (No such file or directory)"),
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04 and more", "is not a GGUF file"),
        (b"GGUF" + b"\xff" * 60, "cannot read it"),
    ],
)
def test_bad_files_produce_a_one_line_error(tmp_path, capsys, content, expected):
    file = tmp_path / "model.gguf"
    if content is not None:
        file.write_bytes(content)
    assert main(["import-gguf", str(file), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"model.gguf"}


def test_half_a_file_leaves_nothing_behind(tmp_path, capsys):
    file = tmp_path / "model.gguf"
    with smollm2_file().open("rb") as whole:
        file.write_bytes(whole.read(30_000_000))
    assert main(["import-gguf", str(file), str(tmp_path / "out")]) == 2
    assert "cannot read it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_existing_output_is_not_replaced(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    assert main(["import-gguf", str(smollm2_file()), str(tmp_path / "out")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine").read_text() == "kept"


def test_numbers_of_the_config_are_those_that_people_write(smollm2):
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-05
    assert config["architectures"] == ["LlamaForCausalLM"]
