"""The race of the operators runs every entry on a cpu, and does not time a wrong result of ours."""

import csv
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def bench(folder, *options):
    script = BENCHMARKS / "bench_ops.py"
    command = [sys.executable, script, "--tiny", "--quick", "--out", folder, *options]
    environment = os.environ | {"MINDSPEED_DEVICE": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_shape_that_no_case_has_is_told(tmp_path):
    done = bench(tmp_path, "--only", "swiglu", "--shape", "7x7")
    assert done.returncode == 1 and "--shape '7x7' is in no case of swiglu" in done.stderr
    assert not list(tmp_path.iterdir())


def test_every_entry_races_on_a_cpu(tmp_path):
    done = bench(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "ops.csv").open() as file:
        rows = list(csv.DictReader(file))
    ours = {row["op"] for row in rows if row["peer"] == "ours"}
    assert len(ours) >= len(list((BENCHMARKS / "ops").glob("*.py"))) > 5
    for row in rows:
        assert float(row["p20_us"]) <= float(row["gpu_us"]) <= float(row["p80_us"])
    assert (tmp_path / "ops.png").stat().st_size > 1000


def test_every_target_can_be_raced(monkeypatch):
    """What is held against is a peer, a yardstick, or told by every row."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = [path.stem for path in (BENCHMARKS / "ops").glob("*.py")]
    cases = [case for name in names for case in importlib.import_module(f"ops.{name}").CASES]
    with (BENCHMARKS / "op_targets.csv").open() as file:
        targets = list(csv.DictReader(file))
    assert {target["row"] for target in targets} == {str(row) for row in range(1, 15)}
    for target in targets:
        raced = [c for c in cases if c.op == target["op"] and target["pass"] in c.work]
        assert raced, target
        assert set(filter(None, target["shape"].split("|"))) <= {c.shape for c in raced}, target
        others = {"floor", "best other"}.union(
            *(c.peers.keys() | c.yardsticks.keys() for c in raced)
        )
        assert target["against"] in others or target["against"].endswith((" us", " MiB")), target


@pytest.fixture
def racing(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_ops
    from op_clock import CpuClock

    return bench_ops.Bench(CpuClock(), 0.0)


def race_doubling(bench, ours, yardsticks=None):
    from op_case import Case, Work

    case = Case(
        op="double",
        shape="7",
        dtype=torch.float32,
        make_inputs=lambda device: (torch.randn(7, device=device, requires_grad=True),),
        peers={"ours": ours, "eager": lambda x: x + x, "absent": None},
        reference=lambda x: 2 * x,
        yardsticks=yardsticks or {},
        work={"fwd": Work(bytes=56), "full": Work(bytes=112)},
    )
    bench.race(case)
    return {(row["peer"], row["pass"]) for row in bench.rows}


def test_a_right_result_is_timed(racing):
    passes = {(peer, which) for peer in ("ours", "eager") for which in ("fwd", "full")}
    assert race_doubling(racing, lambda x: 2 * x) == passes
    assert not racing.failures


def test_a_yardstick_is_timed_but_is_no_peer(racing):
    nothing = {which: lambda: None for which in ("fwd", "full")}
    race_doubling(racing, lambda x: 2 * x, {"nothing": lambda x: nothing})
    rows = {(row["peer"], row["pass"]): row for row in racing.rows}
    ours, eager, least = (rows[peer, "full"] for peer in ("ours", "eager", "nothing"))
    assert float(least["gpu_us"]) < float(eager["gpu_us"]) and least["error"] == ""
    share = float(eager["gpu_us"]) / float(ours["gpu_us"])
    assert float(ours["best_other_over_time"]) == pytest.approx(share, rel=0.1)


def test_long_passes_get_fewer_samples(racing):
    from bench_ops import FEWEST, LEAST, Entrant

    def samples(call, seconds):
        racing.seconds = seconds
        [(_, gpu, _)] = racing._sample([Entrant("ours", call, call, "wall", "", "")])
        return len(gpu)

    assert samples(lambda: time.sleep(0.01), 0.01) == FEWEST
    assert samples(lambda: None, 1.0) >= LEAST


def test_a_wrong_output_is_not_timed(racing):
    assert {peer for peer, _ in race_doubling(racing, lambda x: 2.001 * x)} == {"eager"}
    assert "allowed 1e-05" in racing.failures[0]


def test_a_wrong_gradient_is_not_timed(racing):
    raced = race_doubling(racing, lambda x: x + x.detach())
    assert {peer for peer, _ in raced} == {"eager"} and racing.failures


def test_a_result_that_differs_from_run_to_run_is_not_timed(racing):
    raced = race_doubling(racing, lambda x: 2 * x + 1e-7 * torch.rand(7))
    assert {peer for peer, _ in raced} == {"eager"}
    assert "two runs differ" in racing.failures[0]


def test_an_output_that_was_never_written_is_not_timed(racing):
    raced = race_doubling(racing, lambda x: 2 * x + torch.full((7,), torch.nan))
    assert {peer for peer, _ in raced} == {"eager"} and racing.failures
