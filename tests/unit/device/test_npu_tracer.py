"""The trace of an NPU, with what torch-npu's wheel has under these names.

tests/conventions/test_torch_npu.py binds the calls to the wheel's signatures.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mindspeed import device
from mindspeed.device import TraceContent


class _Profile:
    def __init__(self, **given: Any) -> None:
        self.given, self.calls = given, []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append(self.given["on_trace_ready"])


@pytest.mark.parametrize(
    ("level", "with_cpu", "kinds"), [("level0", False, ["npu"]), ("level2", True, ["npu", "cpu"])]
)
def test_its_profiler_gets_the_level_and_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, with_cpu: bool, kinds: list[str]
) -> None:
    torch_npu = ModuleType("torch_npu")
    levels = SimpleNamespace(Level0=0, Level1=1, Level2=2, Level_none=-1)
    torch_npu.profiler = SimpleNamespace(  # type: ignore[attr-defined]
        ProfilerActivity=SimpleNamespace(NPU="npu", CPU="cpu"),
        ProfilerLevel=levels,
        _ExperimentalConfig=SimpleNamespace,
        tensorboard_trace_handler=lambda dir_name, worker_name: (dir_name, worker_name),
        profile=_Profile,
    )
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    content = TraceContent(level=level, with_cpu=with_cpu, with_stack=True)
    tracer: Any = device.known()["npu"].tracer(tmp_path, 3, content)
    tracer.start()
    assert tracer.stop(12) == tmp_path
    made = tracer._profiler
    assert made.calls == ["start", (str(tmp_path), "rank3")]
    assert made.given["activities"] == kinds
    assert made.given["experimental_config"].profiler_level == int(level[-1])
    assert made.given["with_stack"] and not made.given["record_shapes"]
