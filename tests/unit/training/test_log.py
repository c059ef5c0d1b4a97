"""The log of a run: means over an interval, and a progress bar on terminals only."""

import json
import logging
import os
import pty
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TextIO

import pytest

from mindspeed.training.log import ProgressBar, StepClock, TrainingLog
from mindspeed.training.metrics import StepResult


def step(loss, tokens, **more):
    usual = {"grad_norm": 1.0, "loss_scale": 1.0, "is_updated": True, "is_finite": True}
    usual |= {"should_stop": False}
    return StepResult(metrics={"loss": loss}, tokens=tokens, **usual | more)


@pytest.fixture
def written(tmp_path):
    """Log steps, two a line; return what was written."""

    def log(*steps):
        file = tmp_path / "log.jsonl"
        training = TrainingLog(interval=2, total=100, global_batch=8, is_writer=True, file=file)
        training.start(0)
        began = time.perf_counter()
        for number, each in enumerate(steps, 1):  # a step takes two seconds
            training.add(number, 8 * number, 0.1, each, began + 2 * number)
        return [json.loads(line) for line in file.read_text().splitlines()]

    return log


def test_a_line_is_the_mean_of_its_steps(written):
    first, second = written(step(1.0, 10), step(2.0, 30), step(4.0, 10), step(5.0, 10))
    assert (first["iteration"], first["loss"], second["loss"]) == (2, 1.5, 4.5)
    assert first["consumed samples"] == 16
    assert second["elapsed time per iteration (ms)"] == pytest.approx(2000.0)
    assert second["tokens/s"] == pytest.approx(5.0)


class Recorded:
    """An event of a device, at a number of seconds by its own clock."""

    def __init__(self, seconds):
        self.seconds = seconds

    def elapsed_time(self, other):
        return 1000 * (other.seconds - self.seconds)


def test_a_step_that_is_read_late_has_the_time_of_the_device():
    clock, began = StepClock(), time.perf_counter()
    first = clock.time_of(Recorded(50.0))
    assert began <= first <= time.perf_counter()
    time.sleep(0.05)
    assert clock.time_of(Recorded(50.01)) == pytest.approx(first + 0.01)
    # The first one may have been read late; still no step is finished in the future.
    assert clock.time_of(Recorded(99.0)) <= time.perf_counter()
    assert clock.time_of(None) <= time.perf_counter()


def test_steps_that_are_no_numbers_are_counted_and_not_in_the_mean(written):
    (line,) = written(step(float("nan"), 10, is_finite=False, is_updated=False), step(2.0, 10))
    assert line["loss"] == 2.0
    assert (line["number of nan iterations"], line["number of skipped iterations"]) == (1, 0)


def test_a_metric_that_some_steps_lack_is_the_mean_of_the_others(written):
    whole = replace(step(2.0, 10), metrics={"loss": 2.0, "margin": 3.0})
    first, second = written(step(1.0, 10), whole, step(4.0, 10), step(4.0, 10))
    assert (first["loss"], first["margin"]) == (1.5, 3.0)
    assert "margin" not in second


def test_without_tokens_there_is_no_speed_of_them(written):
    (line,) = written(step(1.0, 0), step(2.0, 0))
    assert "tokens/s" not in line


WANDB = """
import json, pathlib
class Run:
    def __init__(self, path): self.path = path
    def write(self, *values):
        with self.path.open("a") as file: file.write(json.dumps(values) + "\\n")
    def log(self, values, step): self.write(step, values)
    def finish(self): self.write("finished")
def init(config, id, resume):
    run = Run(pathlib.Path(config["save"]) / "wandb.jsonl")
    run.write(id, resume)
    return run
"""
"""A package with the calls of wandb that a run makes, which writes them to a file."""


def test_wandb_gets_the_same_numbers_and_goes_on_with_the_run_of_a_save(tmp_path, monkeypatch):
    from mindspeed.training.options import RunOptions
    from mindspeed.training.trackers import WandbRun, check_trackers

    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = RunOptions(save=str(tmp_path), report_to=("wandb",))
    check_trackers(options)
    for iteration in (1, 2):
        tracker = WandbRun(options)
        log = TrainingLog(interval=1, total=9, global_batch=8, is_writer=True, tracker=tracker)
        log.add(iteration, 8 * iteration, 0.1, step(0.5, 10), time.perf_counter())
        log.finish()
    lines = list(map(json.loads, (tmp_path / "wandb.jsonl").read_text().splitlines()))
    assert lines[0] == lines[3] and lines[0][1] == "allow"
    assert [line[0] for line in lines[1:3] + lines[4:]] == [1, "finished", 2, "finished"]
    assert lines[1][1]["loss"] == 0.5 and "iteration" not in lines[1][1]
    del sys.modules["wandb"]


def test_trackers_that_cannot_run_are_refused(tmp_path):
    from mindspeed.config import ConfigError
    from mindspeed.training.options import RunOptions
    from mindspeed.training.trackers import board_folder, check_trackers

    with pytest.raises(ConfigError, match="wandb is not installed: pip install wandb"):
        check_trackers(RunOptions(report_to=("wandb",)))
    with pytest.raises(ConfigError, match="give --tensorboard-dir or --save"):
        check_trackers(RunOptions(report_to=("tensorboard",)))
    assert board_folder(RunOptions(report_to=("tensorboard",), save="s")) == "s/tensorboard"


RESULT = StepResult(
    metrics={"lm loss": 1.23456},
    grad_norm=1.0,
    tokens=100,
    loss_scale=1.0,
    is_updated=True,
    is_finite=True,
    should_stop=False,
)


def _run(bar: ProgressBar) -> None:
    bar.start(1)
    for iteration in (2, 3):
        logging.getLogger("bar").warning("line %d", iteration)
        bar.add(iteration, RESULT, time.perf_counter())
    bar.stop()


END = "<the end>"


def _read(master: int, stream: TextIO) -> str:
    """Give all that was written; one read may give a part of it only."""
    stream.write(END)
    stream.flush()
    shown = b""
    while END.encode() not in shown:
        shown += os.read(master, 1 << 16)
    return shown.decode()


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Make stdout and stderr a terminal, to which logging writes; give what was shown."""
    master, slave = pty.openpty()
    stream = os.fdopen(slave, "w")
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(sys, "stdout", stream)
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "100")
        yield lambda: _read(master, stream)
    assert handler.stream is stream, "logging was not given back its stream"
    logging.getLogger().removeHandler(handler)
    stream.close()
    os.close(master)


def test_a_terminal_shows_step_loss_speed_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as read:
        _run(ProgressBar(4, is_writer=True))
        shown = read()
    assert "3/4" in shown and "lm loss 1.2346" in shown and "tokens/s" in shown
    assert "line 2" in shown and "line 3" in shown


def test_other_ranks_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as read:
        _run(ProgressBar(4, is_writer=False))
        assert "tokens/s" not in read()


def test_without_a_terminal_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    _run(ProgressBar(4, is_writer=True))
    assert "tokens/s" not in "".join(capfd.readouterr())
