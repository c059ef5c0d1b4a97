"""What `--overwrite` of convert replaces, and what it never does."""

import filecmp
import shutil

import pytest

from mindspeed.checkpoint.commit import staged_directory
from mindspeed.config import ConfigError
from mindspeed_llm.cli.main import main
from tests.llm import tiny

BACK = ("--load-model-type", "mg", "--save-model-type", "hf")


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return tiny.save("qwen2", tmp_path_factory.mktemp("models"))


def run(capsys, source, target, *flags):
    """Return the exit code, and the one line of an error without its beginning."""
    code = main(["convert", "--load-dir", str(source), "--save-dir", str(target), *flags])
    errors = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert len(errors) == (code != 0)
    return code, errors[0].partition(": error: ")[2] if errors else ""


def test_a_model_that_is_there_is_kept_and_an_export_replaced_when_asked(capsys, qwen2, tmp_path):
    model, other = (shutil.copytree(qwen2, tmp_path / name) for name in ("model", "other"))
    assert run(capsys, model, tmp_path / "mg") == (0, "")
    for _ in range(2):  # scripts for MindSpeed-LLM name the original model as --save-dir
        assert run(capsys, tmp_path / "mg", other, *BACK, "--overwrite")[0] == 0
        assert filecmp.cmp(other / "model.safetensors", qwen2 / "model.safetensors", False)
        assert (other / "mg2hf" / "model.safetensors").exists()
    out = tmp_path / "out"
    assert run(capsys, tmp_path / "mg", out, *BACK) == (0, "")
    (out / "config.json").write_text("{}")
    code, message = run(capsys, tmp_path / "mg", out, *BACK)
    assert code == 2 and "exists already" in message and (out / "config.json").read_text() == "{}"
    assert run(capsys, tmp_path / "mg", out, *BACK, "--overwrite") == (0, "")
    assert (out / "config.json").read_text() != "{}" and not (out / "mg2hf").exists()


def test_overwrite_replaces_only_models(capsys, qwen2, tmp_path):
    mg, mine = tmp_path / "mg", tmp_path / "mine"
    assert run(capsys, qwen2, mg) == (0, "")
    code, message = run(capsys, mg, mg, *BACK, "--overwrite")
    assert code == 2 and "holds other things, such as hf: choose another directory" in message
    mine.mkdir()
    (mine / "notes.txt").write_text("kept")
    code, message = run(capsys, mg, mine, *BACK, "--overwrite")
    assert code == 2 and "such as notes.txt" in message
    assert (mine / "notes.txt").read_text() == "kept"
    code, message = run(capsys, qwen2, qwen2, "--overwrite")
    assert code == 2 and "is the --load-dir too" in message
    (mg / "latest_checkpointed_iteration.txt").write_text("20")  # a training's
    code, message = run(capsys, qwen2, mg, "--overwrite")
    assert code == 2 and "holds the checkpoints of a training" in message
    assert (mg / "latest_checkpointed_iteration.txt").read_text() == "20"


def test_the_second_of_two_writers_fails(tmp_path):
    final = tmp_path / "out"
    with pytest.raises(ConfigError, match="exists already"):
        with staged_directory(final) as aside:
            (aside / "config.json").write_text("second")
            final.mkdir()
            (final / "config.json").write_text("first")
    assert (final / "config.json").read_text() == "first"
    assert list(tmp_path.iterdir()) == [final]
