"""Run the commands of the READMEs of the multimodal examples."""

import re
from pathlib import Path

import torch

from tests.commands import ROOT, run_page

EXAMPLES = ROOT / "examples"


def run_readme(example: str, folder: Path, steps: int) -> None:
    """Run the commands of an example's README in a folder, with fewer steps."""
    (folder / "examples").symlink_to(EXAMPLES)
    page = EXAMPLES / example / "README.md"
    run_page(
        page, folder, lambda line: re.sub(r"--train-iters \d+", f"--train-iters {steps}", line)
    )


def test_internvl_trains_and_converts_back(tmp_path, monkeypatch):
    from torch.utils.data import DataLoader
    from transformers import InternVLForConditionalGeneration

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
