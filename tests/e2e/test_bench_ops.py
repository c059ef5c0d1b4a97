"""bench_ops.py runs every case on a cpu, and does not time a wrong result of ours."""

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


def test_an_unknown_shape_is_an_error(tmp_path):
    done = bench(tmp_path, "--only", "swiglu", "--shape", "7x7")
    assert done.returncode == 1 and "--shape '7x7' is in no case of swiglu" in done.stderr
    assert not list(tmp_path.iterdir())


def test_every_case_runs_on_a_cpu(tmp_path):
    done = bench(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "ops.csv").open() as file:
        rows = list(csv.DictReader(file))
    ours = {row["op"] for row in rows if row["peer"] == "ours"}
    assert len(ours) >= len(list((BENCHMARKS / "ops").glob("*.py"))) > 5
    for row in rows:
        assert float(row["p20_us"]) <= float(row["gpu_us"]) <= float(row["p80_us"])
    assert (tmp_path / "ops.png").stat().st_size > 1000


def test_every_target_has_a_case(monkeypatch):
    """A target compares with a peer, a lower bound, or a column of every row."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = [path.stem for path in (BENCHMARKS / "ops").glob("*.py")]
    cases = [case for name in names for case in importlib.import_module(f"ops.{name}").CASES]
    with (BENCHMARKS / "op_targets.csv").open() as file:
        targets = list(csv.DictReader(file))
    assert {target["row"] for target in targets} == {str(row) for row in range(1, 15)}
    for target in targets:
        measured = [c for c in cases if c.op == target["op"] and target["pass"] in c.work]
        assert measured, target
        assert set(filter(None, target["shape"].split("|"))) <= {c.shape for c in measured}, target
        others = {"roofline", "best other"}.union(
            *(c.peers.keys() | c.lower_bounds.keys() for c in measured)
        )
        assert target["against"] in others or target["against"].endswith((" us", " MiB")), target


@pytest.fixture
def bench_on_cpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_ops
    from op_clock import CpuClock

    return bench_ops.Bench(CpuClock(), 0.0)


def measure_doubling(bench, ours, lower_bounds=None):
    from op_case import Case, Work

    case = Case(
        op="double",
        shape="7",
        dtype=torch.float32,
        make_inputs=lambda device: (torch.randn(7, device=device, requires_grad=True),),
        peers={"ours": ours, "eager": lambda x: x + x, "absent": None},
        reference=lambda x: 2 * x,
        lower_bounds=lower_bounds or {},
        work={"fwd": Work(bytes=56), "full": Work(bytes=112)},
    )
    bench.run_case(case)
    return {(row["peer"], row["pass"]) for row in bench.rows}


def test_a_right_result_is_timed(bench_on_cpu):
    passes = {(peer, which) for peer in ("ours", "eager") for which in ("fwd", "full")}
    assert measure_doubling(bench_on_cpu, lambda x: 2 * x) == passes
    assert not bench_on_cpu.failures


def test_a_lower_bound_is_timed_but_is_no_peer(bench_on_cpu):
    nothing = {which: lambda: None for which in ("fwd", "full")}
    measure_doubling(bench_on_cpu, lambda x: 2 * x, {"nothing": lambda x: nothing})
    rows = {(row["peer"], row["pass"]): row for row in bench_on_cpu.rows}
    ours, eager, least = (rows[peer, "full"] for peer in ("ours", "eager", "nothing"))
    assert float(least["gpu_us"]) < float(eager["gpu_us"]) and least["error"] == ""
    share = float(eager["gpu_us"]) / float(ours["gpu_us"])
    assert float(ours["best_other_over_time"]) == pytest.approx(share, rel=0.1)


def test_long_passes_get_fewer_samples(bench_on_cpu):
    from bench_ops import MIN_LONG_SAMPLES, MIN_SAMPLES, Candidate

    def samples(call, seconds):
        bench_on_cpu.seconds = seconds
        [(_, gpu, _)] = bench_on_cpu._sample([Candidate("ours", call, call, "wall", "", "")])
        return len(gpu)

    assert samples(lambda: time.sleep(0.01), 0.01) == MIN_LONG_SAMPLES
    assert samples(lambda: None, 1.0) >= MIN_SAMPLES


def test_a_wrong_output_is_not_timed(bench_on_cpu):
    assert {peer for peer, _ in measure_doubling(bench_on_cpu, lambda x: 2.001 * x)} == {"eager"}
    assert "allowed 1e-05" in bench_on_cpu.failures[0]


def test_a_wrong_gradient_is_not_timed(bench_on_cpu):
    measured = measure_doubling(bench_on_cpu, lambda x: x + x.detach())
    assert {peer for peer, _ in measured} == {"eager"} and bench_on_cpu.failures


def test_a_result_that_differs_from_run_to_run_is_not_timed(bench_on_cpu):
    measured = measure_doubling(bench_on_cpu, lambda x: 2 * x + 1e-7 * torch.rand(7))
    assert {peer for peer, _ in measured} == {"eager"}
    assert "two runs differ" in bench_on_cpu.failures[0]


def test_an_output_that_was_never_written_is_not_timed(bench_on_cpu):
    measured = measure_doubling(bench_on_cpu, lambda x: 2 * x + torch.full((7,), torch.nan))
    assert {peer for peer, _ in measured} == {"eager"} and bench_on_cpu.failures
