"""Megatron's log line gets the throughput of its steps."""

import torch
from megatron.core import num_microbatches_calculator

from mindspeed.tune import megatron
from mindspeed.tune.flop_meter import FlopMeter

LINE = (
    " [2025-01-01 00:00:00] iteration        2/      10 | consumed samples:            8 |"
    " elapsed time per iteration (ms): 500.0 | learning rate: 1.000000E-03 | lm loss: 8.5E+00 |"
)


def test_the_rates_stand_behind_the_time_they_come_from(monkeypatch):
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 4, 2, 1)
    fresh = FlopMeter()
    monkeypatch.setattr(megatron, "meter", lambda: fresh)
    printed = []
    print_rank_last = megatron.wrap_print_rank_last(printed.append)
    print_rank_last(LINE)  # before the first step there is nothing to tell
    step = megatron.wrap_train_step(lambda size: torch.ones(size, 5) @ torch.ones(5, 7))
    step(10**9 // 70)
    step(1)  # has the same work as the first of its number of micro-batches, so is not counted
    print_rank_last(LINE)
    print_rank_last("another message")
    num_microbatches_calculator.unset_num_microbatches_calculator()
    rates = (
        " model throughput per GPU (TFLOP/s/GPU): 0.002 |"
        " hardware throughput per GPU (TFLOP/s/GPU): 0.002 |"
    )
    assert printed == [LINE, LINE.replace(": 500.0 |", f": 500.0 |{rates}"), "another message"]
