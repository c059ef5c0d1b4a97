"""Run the commands of the READMEs of the multimodal examples."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from mindspeed_mm.cli.main import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run_readme(example: str, folder: Path, steps: int) -> None:
    """Run the commands of an example's README in the working directory, with fewer steps."""
    text = (EXAMPLES / example / "README.md").read_text()
    commands = re.search(r"```bash\n(.*?)```", text, re.DOTALL)[1].replace("\\\n", " ")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in commands.strip().splitlines():
        line = re.sub(r"--train-iters \d+", f"--train-iters {steps}", line)
        words = [re.sub(r"^examples/", f"{EXAMPLES}/", word) for word in shlex.split(line)]
        if words[0] == "mindspeed-mm":  # in this process: most of its time is imports
            assert main(words[1:]) == 0, line
            continue
        done = subprocess.run(
            words, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_internvl_trains_and_converts_back(tmp_path, monkeypatch):
    from torch.utils.data import DataLoader
    from transformers import InternVLForConditionalGeneration

    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    run_readme("internvl", tmp_path, steps=25)
    monkeypatch.syspath_prepend(str(EXAMPLES / "internvl"))
    from colours import Colours

    batch = next(iter(DataLoader(Colours(32), 32)))
    losses = []
    for name in ("internvl", "internvl-hf"):
        model = InternVLForConditionalGeneration.from_pretrained(tmp_path / "out" / name)
        with torch.no_grad():
            losses.append(float(model(**batch).loss))
    assert losses[1] < 0.5 * losses[0], losses


def test_diffusion_trains(tmp_path):
    run_readme("diffusion", tmp_path, steps=40)
    log = (tmp_path / "out" / "diffusion" / "log.jsonl").read_text().splitlines()
    losses = [float(re.search(r'"loss": ([\d.e+-]+)', line)[1]) for line in log]
    assert losses[-1] < 0.9 * losses[0], losses
