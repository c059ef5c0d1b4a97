"""`mindspeed report` shows what options switch on in the installed Megatron."""

import os
import subprocess
import sys

import pytest

from mindspeed.cli.main import main
from mindspeed.compat.table import TABLE
from tests.commands import run_command


def report(*words, env=None):
    return subprocess.run(
        [sys.executable, "-m", "mindspeed", "report", *words],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


def line_of(text, feature):
    return next(line.split() for line in text.splitlines() if line.startswith(feature))


def test_flags():
    done = report("--use-fused-swiglu", "--optimization-level", "1")
    assert done.returncode == 0, done.stderr
    assert line_of(done.stdout, "fused_swiglu") == [
        *("fused_swiglu", "1", "on", "--use-fused-swiglu", "is", "set"),
    ]
    assert "wrap megatron.core.fusions.fused_bias_swiglu:bias_swiglu_impl: applied, " in done.stdout


def test_compat_entries_are_reported_at_level_0():
    code, output = run_command("mindspeed", "report", "--optimization-level", "0")
    assert code == 0, output
    for entry in TABLE:
        assert line_of(output, entry.name)[1:] == ["0", "on", "always", "on"]
    assert "    torch.cuda calls land on cpu" in output


def test_yaml(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("noop_layers: [0, 5]\n")
    code, output = run_command("mindspeed", "report", "--config", str(file))
    assert code == 0, output
    assert line_of(output, "noop_layers")[:3] == ["noop_layers", "2", "on"]
    assert line_of(output, "fused_swiglu")[2] == "off"


@pytest.mark.parametrize(
    "text, words, message",
    [
        ("use_fused_swigul: true", [], "unknown key use_fused_swigul: true; did you mean"),
        ("", ["--use-fused-swiglu"], "--config and other options are given"),
    ],
)
def test_wrong_options(tmp_path, capsys, text, words, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert main(["report", "--config", str(file), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_unusable_device_is_one_line():
    done = report(env={"MINDSPEED_DEVICE": "tpu"})
    assert done.returncode == 2
    assert "MINDSPEED_DEVICE=tpu is not a device" in done.stderr
    assert done.stderr.count("\n") == 1
