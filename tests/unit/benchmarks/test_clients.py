"""ms-swift's lines become steps."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_clients
from train_step.shapes import SHAPES

LINES = [
    {"loss": 6.25, "memory(GiB)": 1.5, "train_speed(s/it)": 4.0},
    {"loss": 6.20, "memory(GiB)": 2.5, "train_speed(s/it)": 2.5},
    {"loss": 6.10, "memory(GiB)": 2.5, "train_speed(s/it)": 2.0},
]


def steps():
    found, total = [], 0.0
    for number, line in enumerate(LINES, 1):
        step, total = bench_clients.read(line, number, total)
        found.append(step)
    return found


def test_a_mean_over_all_steps_becomes_seconds_of_each():
    assert [step.seconds for step in steps()] == pytest.approx([4.0, 1.0, 1.0])


def test_the_first_steps_do_not_count():
    options = argparse.Namespace(warm_up=1, shape="tiny", micro_batch=2, flags="", site="")
    row = bench_clients.columns(2, steps(), SHAPES["tiny"], options)
    assert row["tokens_per_s"] == "1024"
    assert (row["first_loss"], row["last_loss"]) == ("6.25000", "6.10000")
    assert row["reserved_gib"] == "2.5"
