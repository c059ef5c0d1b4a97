"""Swapped tensors on a GPU: fifty steps equal the plain ones in every bit, with late copies too."""

import json
import os
import subprocess
import sys

import pytest

from tests.gpu.launched import ROOT, START

pytestmark = pytest.mark.gpu
SCRIPT = START + "from tests.gpu.swap_run import main\nmain()\n"


def _run(folder, stages, *names):
    """Run the script once for each pipeline stage, all on one card; return their lines."""
    path = folder / "script.py"
    path.write_text(SCRIPT)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path), str(folder), str(stages), *names],
            cwd=ROOT,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(stages), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(stages)
    ]
    lines = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=200)
            assert rank.returncode == 0, err
            lines.append(json.loads(out.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
    return lines


def _check(plain, *others):
    losses, gradients, copies = plain
    assert copies == [] and len(losses) == 50
    for found, digest, counts in others:
        assert found == losses and digest == gradients
        assert all(counts) and len(counts) == 2


def test_one_rank(tmp_path):
    (found,) = _run(tmp_path, 1, "plain", "swapped", "late", "recomputed", "inputs late")
    _check(found["plain"], found["swapped"], found["late"])
    _check(found["recomputed"], found["inputs late"])
    assert found["plain"][0][-1] < found["plain"][0][0]


def test_two_pipeline_stages_on_one_card(tmp_path):
    for found in _run(tmp_path, 2, "plain", "late"):
        _check(found["plain"], found["late"])
    assert found["plain"][0][-1] < found["plain"][0][0]
