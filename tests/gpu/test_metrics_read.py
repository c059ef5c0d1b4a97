"""Metrics of a step that are read while the device still works."""

import math
import time

import pytest
import torch

from mindspeed.training.log import StepClock
from mindspeed.training.metrics import StepTotals

pytestmark = pytest.mark.gpu
CYCLES = 200_000_000  # about 100 ms


def test_a_read_waits_for_its_copy_and_has_the_values_of_when_it_was_queued():
    values = torch.full((3,), math.nan, device="cuda")
    expected = torch.tensor([6.0, 3.0, 5.0], device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    values.copy_(expected)
    read = StepTotals(["loss"], values).start_read()
    torch.cuda._sleep(CYCLES)
    values.fill_(math.nan)
    end = torch.cuda.current_stream().record_event()
    reduced, _ = read.wait()
    is_early = not end.query()
    assert reduced.metrics == {"loss": 2.0} and reduced.tokens == 5 and reduced.is_finite
    assert is_early  # what was queued behind the copy was not waited for


def test_the_time_between_two_results_is_that_of_the_device():
    values, clock = torch.ones(3, device="cuda"), StepClock()
    first = StepTotals(["loss"], values).start_read()
    first.wait()
    began = clock.time_of(first.done)
    torch.cuda._sleep(CYCLES)
    second = StepTotals(["loss"], values).start_read()
    torch.cuda.synchronize()
    done = time.perf_counter()
    time.sleep(0.2)  # it is read later
    second.wait()
    assert abs(clock.time_of(second.done) - done) < 0.02 and done - began > 0.05
