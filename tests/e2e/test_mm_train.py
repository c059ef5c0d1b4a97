"""`mindspeed-mm train` under its script names, and the ten-minutes page as typed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.mm.folder import make_folder
from tests.unit.mindspeed_llm.training.tiny_run import read_losses

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 240.0

pytestmark = pytest.mark.timeout(4 * TIMEOUT)


def start(*words: str, nproc: int = 1, cwd: Path = ROOT) -> subprocess.Popen[str]:
    launcher = ["-m", "mindspeed", "run", "--nproc", str(nproc)] if nproc > 1 else []
    command = [sys.executable, *launcher, *words]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*words: str, nproc: int = 1, cwd: Path = ROOT) -> tuple[int, str]:
    process = start(*words, nproc=nproc, cwd=cwd)
    output, _ = process.communicate(timeout=TIMEOUT)
    return process.returncode, output


def test_the_page_as_typed(tmp_path: Path) -> None:
    page = (ROOT / "docs/mm/ten_minutes.md").read_text()
    for name, kind in (("train.py", "python"), ("fsdp2_config.yaml", "yaml")):
        found = re.search(rf"^`{name}`:\n\n```{kind}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        assert found is not None
        (tmp_path / name).write_text(found[1])
    command = re.search(r"^```bash\nmindspeed run --nproc 2 (.*)$", page, re.MULTILINE)
    assert command is not None
    code, output = run(*command[1].split(), nproc=2, cwd=tmp_path)
    assert code == 0 and "validation loss" in output, output
    losses = read_losses_only(tmp_path / "out/log.jsonl")
    assert len(losses) == 30 and sum(losses[-5:]) < 0.5 * sum(losses[:5])


def read_losses_only(log: Path) -> list[float]:
    lines = [line for line in log.read_text().splitlines(keepends=True) if '"loss"' in line]
    only = log.with_name("losses.jsonl")
    only.write_text("".join(lines))
    return read_losses(str(only), "loss")


def test_one_file_trains_stops_and_resumes(tmp_path: Path) -> None:
    file = make_folder(tmp_path, train_iters=1000, eval_interval=2, eval_iters=9)
    log = tmp_path / "saved/log.jsonl"
    process = start("pretrain_transformers.py", str(file), nproc=2)
    end = time.monotonic() + TIMEOUT
    while not (log.is_file() and log.read_text().count("\n") >= 3):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=TIMEOUT)
    stopped = (process.returncode, "asked to stop after iteration" in output)
    assert stopped == (128 + signal.SIGTERM, True), output
    assert "validation loss: " in output
    done = len(read_losses_only(log))
    # The saved config is runnable: here on one rank, with a flag after it.
    saved = str(tmp_path / "saved/config.yaml")
    flags = ["pretrain_vlm.py", saved, "--train-iters", str(done + 2)]
    code, output = run_command("python", *flags)
    assert code == 0 and f"resuming after iteration {done}" in output, output
    assert len(read_losses_only(log)) == done + 2
    flags = ["pretrain_transformers.py", str(file), "--load", str(tmp_path / "none")]
    code, output = run_command("python", *flags)
    assert code == 2 and output.count("\n") == 1 and "does not exist" in output, output
