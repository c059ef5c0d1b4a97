"""The trace that a tool section asks for."""

from pathlib import Path

from mindspeed.device import TraceContent
from mindspeed_mm.training.profile import ProfileOptions, ToolConfig, TraceOptions, trace_of


def test_its_steps_and_ranks(tmp_path: Path) -> None:
    steps = TraceOptions(
        start_step=2, end_step=10, save_path=str(tmp_path), with_stack=True, level="level1"
    )
    asked = ToolConfig(profile=ProfileOptions(enable=True, static_param=steps))
    trace = trace_of(asked, 0)
    assert trace is not None
    assert (trace.first, trace.last, trace.folder) == (2, 9, str(tmp_path))
    assert trace.content == TraceContent(with_cpu=True, with_stack=True, level="level1")
    assert trace_of(asked, 1) is None
    assert trace_of(ToolConfig(), 0) is None
    assert trace_of(None, 0) is None
