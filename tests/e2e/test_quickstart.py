"""`make quickstart`, mindspeed_llm's way, with a random model in the place of the real one."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "quickstart"


@pytest.mark.timeout(1200)
def test_every_command_of_the_page_works(tmp_path):
    runpy.run_path(str(FOLDER / "get_model.py"))["save_random_model"](tmp_path / "model")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+) \| loss scale", done.stdout)]
    assert len(losses) == 35 and losses[-1] < losses[0] - 0.2
    questions = (FOLDER / "questions.txt").read_text().splitlines()
    for name in ("before", "after"):
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["prompt"] for line in lines] == questions
    assert all(question in done.stdout for question in questions)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_make_quickstart_runs_the_page():
    recipe = re.search(
        r"^quickstart: setup\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert recipe and recipe[1] == "$(BIN)/python examples/quickstart/run.py"


def test_a_step_that_fails_ends_the_run(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and 'Step "2. Preprocess" failed' in done.stdout
