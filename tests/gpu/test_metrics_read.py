"""Metrics of a step that are read while the device still works."""

import math
import time

import pytest
import torch

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
    began = time.perf_counter()
    torch.cuda.synchronize()
    again, _ = read.wait()  # later; when the device had the values has not changed
    assert time.perf_counter() - began > 0.05 and abs(again.finished - reduced.finished) < 0.01
    assert reduced.metrics == {"loss": 2.0} and reduced.tokens == 5 and reduced.is_finite
    assert is_early  # what was queued behind the copy was not waited for
