"""The clock of the operator benchmark on a GPU: what it captures, counts and leaves."""

from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from op_clock import CudaClock

    clock = CudaClock()
    with torch.cuda.stream(clock.stream):
        yield clock


def test_what_waits_is_timed_by_events_and_spoils_nothing(clock):
    x = torch.randn(1000, device="cuda")
    assert clock.capture(lambda: x.sum().item())[1] == "events"
    torch.manual_seed(0)
    torch.randn(10, device="cuda")  # the generator still draws
    replay, timed = clock.capture(lambda: x + 1)
    assert timed == "graph" and clock.gpu_seconds(replay) > 0


def test_a_capture_that_fails_leaves_the_generator_in_order(clock, monkeypatch):
    monkeypatch.setattr(clock, "_synchronises", lambda function: False)
    x = torch.randn(1000, device="cuda")
    assert clock.capture(lambda: x.sum().item())[1] == "events"
    torch.randn(10, device="cuda")
    assert clock.capture(lambda: x + 1)[1] == "graph"


def test_a_backward_is_captured(clock):
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    y = (x @ x).sin()
    grad = torch.ones_like(y)
    replay, timed = clock.capture(lambda: torch.autograd.grad(y, [x], [grad], retain_graph=True))
    assert timed == "graph" and clock.gpu_seconds(replay) > 0


def test_launches_and_memory_of_one_call(clock):
    x = torch.randn(2**20, device="cuda")
    assert clock.launches(lambda: x + 1) == 1
    assert clock.peak_bytes(lambda: x + 1) == x.nbytes


def test_a_copy_takes_the_time_its_bandwidth_says(clock):
    bandwidth, _ = clock.peaks()
    source = torch.randn(2**27, device="cuda")
    target = torch.empty_like(source)
    seconds = sorted(clock.gpu_seconds(lambda: target.copy_(source)) for _ in range(9))[4]
    assert 2 * source.nbytes / seconds == pytest.approx(bandwidth, rel=0.15)
