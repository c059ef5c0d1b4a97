"""Traces of steps: written when they end, and when the run ends before that."""

import json
from pathlib import Path

import torch

from mindspeed_mm.training.profile import ProfileOptions, ToolConfig, Trace, TraceOptions


def traces(folder: Path, rank: int = 0) -> list[str]:
    """Run three steps, of which the second is to be the first of eight that are traced."""
    steps = TraceOptions(start_step=2, end_step=10, save_path=str(folder))
    trace = Trace(ToolConfig(profile=ProfileOptions(enable=True, static_param=steps)), rank)
    for number in range(1, 4):
        with trace.step(number):
            torch.ones(2).add_(number)
    trace.end(3)
    trace.end(3)  # once is enough
    return [path.name for path in folder.iterdir()]


def test_a_run_that_ends_within_a_trace_writes_it(tmp_path: Path) -> None:
    assert traces(tmp_path, rank=1) == []
    assert traces(tmp_path) == ["trace_rank0_step3.json"]
    assert json.loads((tmp_path / "trace_rank0_step3.json").read_text())["traceEvents"]
