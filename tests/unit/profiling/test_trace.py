"""Traces of steps: which, on which ranks, what they hold, and in the loop of Megatron-LM."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed.config import ConfigError
from mindspeed.features.base import Context
from mindspeed.features.tools.profile import Profile
from mindspeed.profiling import Trace
from mindspeed.profiling.megatron import wrap_train, wrap_train_step
from mindspeed.profiling.options import TraceOptions, trace_of


def options(folder: Path, **given: Any) -> TraceOptions:
    return TraceOptions(profile=True, profile_save_path=str(folder), **given)


def traced(trace: Trace | None, steps: range) -> None:
    assert trace is not None
    for number in steps:
        with trace.step(number):
            torch.ones(2).add_(number)
            torch.ones(number, 2) @ torch.ones(2, 3)
    trace.end()
    trace.end()  # once is enough


def content(file: Path) -> str:
    return json.dumps(json.loads(file.read_text())["traceEvents"])


def rows_multiplied(file: Path) -> set[int]:
    events = json.loads(file.read_text())["traceEvents"]
    found = [e["args"]["Input Dims"] for e in events if e["name"] == "aten::mm"]
    return {shapes[0][0] for shapes in found}


@pytest.mark.parametrize(
    ("steps", "name", "held"),
    [
        (range(1, 8), "trace_rank0_step5.json", {4, 5}),
        (range(1, 5), "trace_rank0_step4.json", {4}),  # the run ends before the trace
        (range(5, 8), "trace_rank0_step5.json", {5}),  # it is resumed within it
    ],
)
def test_it_holds_the_chosen_steps(tmp_path: Path, steps: range, name: str, held: set[int]) -> None:
    given = options(tmp_path, profile_step_start=3, profile_step_end=5, profile_record_shapes=True)
    traced(trace_of(given, 0), steps)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert rows_multiplied(tmp_path / name) == held


def test_steps_that_are_not_reached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    traced(trace_of(options(tmp_path), 0), range(1, 4))
    assert caplog.messages == ["no trace: steps 11 to 12 were not run"]
    assert not list(tmp_path.iterdir())


def test_ranks(tmp_path: Path) -> None:
    assert trace_of(TraceOptions(), 0) is None
    assert trace_of(options(tmp_path), 5) is not None
    chosen = options(tmp_path, profile_ranks=(1, 2))
    assert [trace_of(chosen, rank) is not None for rank in range(4)] == [False, True, True, False]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/traces .Not a directory.: choose another folder"):
        trace_of(options(tmp_path / "file" / "traces"), 0)


@pytest.mark.parametrize(
    ("flag", "mark"),
    [
        ("profile_with_stack", "Python"),
        ("profile_with_memory", "[memory]"),
        ("profile_record_shapes", "Input Dims"),
    ],
)
def test_what_a_trace_holds(tmp_path: Path, flag: str, mark: str) -> None:
    for name, value in {"without": False, "with": True}.items():
        given = options(
            tmp_path / name, profile_step_start=0, profile_step_end=1, profile_with_cpu=True
        )
        traced(trace_of(given.model_copy(update={flag: value}), 0), range(1, 2))
        found = mark in content(tmp_path / name / "trace_rank0_step1.json")
        assert found == value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"profile_step_start": 12}, "leave no step to trace"),
        ({"profile_step_start": -1}, "leave no step to trace"),
        ({"profile_with_memory": True}, "profile_with_memory needs profile_with_cpu"),
        ({"profile_ranks": (0, 2)}, "profile_ranks 2: give ranks from 0 to 1, or -1"),
        ({"profile_ranks": (-2,)}, "profile_ranks -2"),
    ],
)
def test_what_cannot_be_traced(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Profile().check(TraceOptions(profile=True, **given), Context(megatron={"world_size": 2}))
    Profile().check(TraceOptions(profile=True), Context(megatron={"world_size": 2}))


@pytest.mark.parametrize("megatrons_own", [None, "flag", "nsys"])
def test_megatrons_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megatrons_own: str | None
) -> None:
    parsed = SimpleNamespace(
        profile=True,
        profile_ranks=[-1],
        use_pytorch_profiler=megatrons_own == "flag",
        rank=1,
        world_size=2,
        curr_iteration=0,
    )
    module = ModuleType("megatron.training")
    module.get_args = lambda: parsed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training", module)
    if megatrons_own == "nsys":
        monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    seen = []

    def step() -> None:
        seen.append((parsed.profile, parsed.rank in parsed.profile_ranks))
        torch.ones(parsed.curr_iteration + 1, 2) @ torch.ones(2, 3)

    train_step = wrap_train_step(step)

    def loop() -> None:
        for parsed.curr_iteration in range(4):
            train_step()

    given = options(tmp_path, profile_step_start=1, profile_step_end=3, profile_record_shapes=True)
    wrap_train(loop, given)()
    assert parsed.profile
    files = list(tmp_path.iterdir())
    if megatrons_own:
        assert (seen, files) == ([(True, True)] * 4, [])
        return
    assert not any(profile for profile, _ in seen)
    assert [file.name for file in files] == ["trace_rank1_step3.json"]
    assert rows_multiplied(files[0]) == {2, 3}
