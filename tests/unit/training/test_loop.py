"""The train loop: which rate each step takes, when it saves and evaluates, how it ends."""

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from mindspeed import device
from mindspeed.training.checkpoint_dir import (
    TrainState,
    latest_checkpoint,
    latest_finite,
    read_state,
)
from mindspeed.training.entry import Stopped, run_rank
from mindspeed.training.loop import NotFinite, TrainLoop, _log_changes
from mindspeed.training.metrics import PendingStep, StepResult, StopCheck
from mindspeed.training.options import RunOptions
from mindspeed.tune.flop_meter import FlopMeter

STEPS = 8


class Saves:
    """Records what is saved."""

    def __init__(self):
        self.saved, self.is_finished = [], False

    def save(self, state, *, keep_last=None, in_background=False):
        self.saved.append((state.iteration, state.consumed_samples))

    def poll(self):
        pass

    def finish(self):
        self.is_finished = True


class Recorded:
    """A trainer whose steps compute nothing and record what they were given."""

    def __init__(self, *, start=0, bad=(), meter=None, report=None, **options):
        self.events = {}  # of the device, by iteration
        self.saves, self.taken, self.read, self.evaluated = Saves(), [], [], []
        self._bad = bad
        group = {"lr": -1.0, "lr_mult": 1.0, "wd_mult": 1.0, "weight_decay": -1.0}
        self.optimizer = SimpleNamespace(param_groups=[group])
        given = {"lr": 1.0, "lr_decay_style": "linear", "lr_warmup_iters": 2} | options
        self.options = RunOptions(**given)
        self.loop = TrainLoop(
            self.options,
            checkpoints=self.saves,
            optimizers=[self.optimizer],
            state=self.state(start, start * 4),
            steps=STEPS,
            global_batch=4,
            rank=0,
            world_size=1,
            meter=meter,
            report=report,
        )

    def train_step(self, state, stop):
        group = self.optimizer.param_groups[0]
        iteration = state.iteration + 1
        self.taken.append((iteration, state.consumed_samples, group["lr"]))
        is_finite = iteration not in self._bad
        result = StepResult(
            metrics={"loss": 1.0},
            grad_norm=1.0,
            tokens=1,
            loss_scale=1.0,
            is_updated=is_finite,
            is_finite=is_finite,
            should_stop=False,
            done=self.events.get(iteration),
        )
        return PendingStep(lambda: self.read.append(iteration) or result)

    def evaluate(self):
        self.evaluated.append(self.taken[-1][0])
        return {"loss": 1.0}

    def state(self, iteration, consumed):
        return TrainState(iteration, consumed)

    def config(self):
        return self.options.model_dump(mode="json")


@pytest.fixture
def asynchronous(monkeypatch):
    """Run as on a device that works while the host goes on."""
    monkeypatch.setattr(type(device.current()), "is_asynchronous", True)


@pytest.mark.parametrize("start", [0, 3])
def test_a_step_takes_the_rate_that_the_steps_before_it_have_reached(start):
    """As Megatron does: the first step of a warm-up from 0 has rate 0; a resumed run goes on."""
    trainer = Recorded(start=start)
    end = trainer.loop.run(trainer)
    rates = [0.0, 0.5, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    expected = [(n + 1, 4 * n, pytest.approx(rate)) for n, rate in enumerate(rates)]
    assert trainer.taken == expected[start:]
    assert (end.iteration, end.consumed_samples) == (STEPS, 4 * STEPS)
    assert trainer.optimizer.param_groups[0]["weight_decay"] == RunOptions(lr=1.0).weight_decay


def test_saves_come_at_the_interval_and_at_the_end():
    trainer = Recorded(save_interval=3)
    trainer.loop.run(trainer)
    assert trainer.saves.saved == [(3, 12), (6, 24), (8, 32)] and trainer.saves.is_finished
    last = Recorded()
    last.loop.run(last)
    assert last.saves.saved == [(8, 32)]


def test_evaluation_comes_at_its_interval():
    trainer = Recorded(eval_interval=3, eval_iters=1)
    trainer.loop.run(trainer)
    assert trainer.evaluated == [3, 6]
    none = Recorded(eval_interval=3, eval_iters=0)
    none.loop.run(none)
    assert none.evaluated == []


def test_only_consecutive_steps_that_are_not_finite_end_a_run():
    trainer = Recorded(bad={1, 2, 4, 5, 7}, max_nan_iterations=3)
    assert trainer.loop.run(trainer).iteration == STEPS
    ended = Recorded(bad={2, 3, 4, 5}, max_nan_iterations=3)
    with pytest.raises(RuntimeError, match="in 3 steps"):
        ended.loop.run(ended)
    assert ended.taken[-1][0] == 4 and ended.saves.is_finished


def unread(trainer):
    """Run a trainer; return how many results of earlier steps each step was queued without."""
    behind, take = [], trainer.train_step

    def watched(state, stop):
        behind.append(state.iteration - len(trainer.read))
        return take(state, stop)

    trainer.train_step = watched
    assert trainer.loop.run(trainer).iteration == STEPS
    assert trainer.read == list(range(1, STEPS + 1))
    return behind


def test_a_step_is_queued_before_the_result_of_the_last_is_read(asynchronous, tmp_path):
    """Unless that is saved or evaluated; every result is read once, and in order."""
    trainer = Recorded(save=str(tmp_path), save_interval=3, eval_interval=5, eval_iters=1)
    # Steps 4, 6 and 7 follow one that was waited for.
    assert unread(trainer) == [0, 1, 1, 0, 1, 0, 0, 1]
    assert trainer.saves.saved == [(3, 12), (6, 24), (8, 32)] and trainer.evaluated == [5]
    assert unread(Recorded(save_interval=3, eval_interval=5, eval_iters=0)) == [0, *[1] * 7]


def test_the_cpu_waits_for_every_step():
    assert unread(Recorded()) == [0] * STEPS


def test_the_operators_of_a_step_are_counted_until_it_is_read(asynchronous):
    assert unread(Recorded(meter=FlopMeter())) == [0] * STEPS


def test_a_step_that_is_done_is_logged_at_once(asynchronous):
    """As those of stages that sample completions are."""
    trainer = Recorded()
    take = trainer.train_step
    trainer.train_step = lambda state, stop: PendingStep.finished(take(state, stop).wait())
    assert unread(trainer) == [0] * STEPS


def test_lines_have_the_times_of_the_device(asynchronous, tmp_path):
    """Whenever a result is read; also around a save, at which the host waits."""
    file = tmp_path / "log.jsonl"
    trainer = Recorded(save=str(tmp_path / "saved"), save_interval=4, log_file=str(file))
    trainer.events = {n: Event(-1000.0 + 0.001 * n * n) for n in range(1, STEPS + 1)}
    take = trainer.train_step
    # The host takes longer to queue a step than the device to do it.
    trainer.train_step = lambda state, stop: time.sleep(0.02) or take(state, stop)
    trainer.loop.run(trainer)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    found = [line["elapsed time per iteration (ms)"] for line in lines[1:]]
    # A save is no part of a step: its time is excluded.
    assert [found[n] for n in (0, 1, 2)] == pytest.approx([3.0, 5.0, 7.0])
    assert [found[n] for n in (4, 5, 6)] == pytest.approx([11.0, 13.0, 15.0])
    assert found[3] <= 9.0


class Event:
    """An event of a device, at a number of seconds by its own clock."""

    def __init__(self, seconds):
        self._seconds = seconds

    def elapsed_time(self, other):
        return 1000 * (other._seconds - self._seconds)


class Reports:
    """A report of every second step; records what happens to it."""

    def __init__(self, trainer_of):
        self._read, self.events = trainer_of, []

    def start(self, iteration):
        if iteration % 2:
            return None
        self.events.append(("start", iteration, len(self._read())))
        return lambda log: self.events.append(("write", iteration, len(self._read())))


def test_a_report_is_of_its_step_alone(asynchronous):
    """It starts before the next step is queued, and is written when its own is read."""
    report = Reports(lambda: trainer.read)
    trainer = Recorded(report=report)
    trainer.loop.run(trainer)
    expected = [("start", 2, 0), ("write", 2, 2), ("start", 4, 2), ("write", 4, 4)]
    assert report.events[:4] == expected and len(report.events) == STEPS


def test_an_error_does_not_hide_the_step_before_it(asynchronous):
    trainer = Recorded()
    take = trainer.train_step

    def failing(state, stop):
        if state.iteration == 4:
            raise ValueError("no fifth batch")
        return take(state, stop)

    trainer.train_step = failing
    with pytest.raises(ValueError, match="no fifth batch"):
        trainer.loop.run(trainer)
    assert trainer.read == [1, 2, 3, 4]


def test_a_queued_step_counts_in_no_streak_before_it_is_read(asynchronous):
    ended = Recorded(bad={2, 3, 4, 5}, max_nan_iterations=3)
    with pytest.raises(RuntimeError, match="in 3 steps up to iteration 4"):
        ended.loop.run(ended)
    assert ended.read[-1] == 4 and ended.taken[-1][0] == 5 and ended.saves.is_finished


def test_a_run_that_is_done_takes_no_step():
    trainer = Recorded(start=STEPS)
    assert (
        trainer.loop.run(trainer).iteration == STEPS
        and trainer.taken == []
        and trainer.saves.saved == []
    )


class Folders:
    """Checkpoints without weights."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(self, state: TrainState, **how: Any) -> None:
        folder = self._root / f"iter_{state.iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "training.json").write_text(json.dumps(asdict(state)))
        tracker = self._root / "latest_checkpointed_iteration.txt"
        tracker.write_text(str(state.iteration))

    def poll(self) -> None:
        """Nothing is saved in the background."""

    finish = poll


class Scripted:
    """A trainer with steps that are not finite, and one that gets a signal."""

    def __init__(
        self,
        root: Path,
        *,
        bad: range = range(0),
        asked: int = 0,
        is_done: bool = False,
        **flags: Any,
    ) -> None:
        self._bad, self._asked, self._is_done = bad, asked, is_done
        options = RunOptions(lr=1.0, save=str(root), **{"train_iters": 12} | flags)
        found = latest_checkpoint(root)
        self._loop = TrainLoop(
            options,
            checkpoints=Folders(root),
            optimizers=[SimpleNamespace(param_groups=[{}])],
            state=TrainState() if found is None else read_state(found),
            steps=options.train_iters or 0,
            global_batch=1,
            rank=0,
            world_size=1,
        )

    def run(self) -> TrainState:
        return self._loop.run(self)

    def train_step(self, state: TrainState, stop: StopCheck) -> PendingStep:
        number = state.iteration + 1
        is_finite = number not in self._bad
        if number == self._asked:
            os.kill(os.getpid(), signal.SIGTERM)
        result = StepResult({"loss": 1.0}, 1.0, 1, 1.0, is_finite, is_finite, stop())
        return PendingStep.finished(result) if self._is_done else PendingStep(lambda: result)

    def evaluate(self) -> None:
        return None

    def state(self, iteration: int, consumed: int) -> TrainState:
        return TrainState(iteration, consumed)

    def config(self) -> dict[str, Any]:
        return {}


def _folders(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in root.glob("iter_*"))


def test_nan_names_the_checkpoint_before_the_streak_and_saves_none_in_it(tmp_path: Path) -> None:
    with pytest.raises(NotFinite) as caught:
        Scripted(tmp_path, bad=range(6, 99), save_interval=2, max_nan_iterations=5).run()
    assert str(caught.value) == (
        "the loss or its gradient was not finite in 5 steps up to iteration 10: lower --lr, or "
        "check the data of these steps; the newest checkpoint from before is "
        f"{tmp_path}/iter_0000004"
    )
    assert _folders(tmp_path) == [2, 4]


def test_nan_names_no_checkpoint_that_was_not_written(tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match="; none was saved before$"):
        Scripted(tmp_path, bad=range(1, 99), save_interval=2, max_nan_iterations=5).run()
    assert _folders(tmp_path) == []


def test_a_streak_that_ends_delays_a_save_only(tmp_path: Path) -> None:
    Scripted(tmp_path, bad=range(4, 7), save_interval=2, max_nan_iterations=5).run()
    assert _folders(tmp_path) == [2, 8, 10, 12]


def test_a_checkpoint_saved_in_a_streak_is_not_called_good(tmp_path: Path) -> None:
    flags = {"bad": range(6, 99), "save_interval": 4, "max_nan_iterations": 5}
    with pytest.raises(Stopped):
        Scripted(tmp_path, asked=6, **flags).run()
    assert _folders(tmp_path) == [4, 6] and read_state(tmp_path / "iter_0000006").nan_streak == 1
    assert latest_finite(tmp_path, 99) == tmp_path / "iter_0000004"
    with pytest.raises(NotFinite, match="in 5 steps up to iteration 10.*/iter_0000004$"):
        Scripted(tmp_path, **flags).run()


def test_the_exit_code_shows_that_a_run_was_asked_to_stop(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        Scripted(tmp_path, asked=5).run()
    assert caught.value.code == 143
    assert isinstance(caught.value, Stopped) and caught.value.iteration == 5
    assert _folders(tmp_path) == [5]


def test_a_run_that_is_asked_to_stop_saves_after_the_step_that_is_queued(
    tmp_path: Path, asynchronous: None
) -> None:
    with pytest.raises(Stopped) as caught:
        Scripted(tmp_path, asked=5).run()
    assert caught.value.iteration == 6 and _folders(tmp_path) == [6]


def test_a_run_of_finished_steps_stops_at_once(tmp_path: Path, asynchronous: None) -> None:
    with pytest.raises(Stopped) as caught:
        Scripted(tmp_path, asked=5, is_done=True).run()
    assert caught.value.iteration == 5 and _folders(tmp_path) == [5]


def test_a_signal_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    assert Scripted(tmp_path, asked=12).run().iteration == 12


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_nan_is_one_line_of_one_rank(
    tmp_path: Path,
    local_rank: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    run = Scripted(tmp_path, bad=range(1, 99))
    assert run_rank(lambda: run.run() and None) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (local_rank == "0")
    assert all("error: the loss or its gradient was not finite" in line for line in lines)


def test_a_config_begins_with_what_was_chosen(tmp_path):
    run = Recorded(save=str(tmp_path), report_to=("none",))
    run.loop.run(run)
    text = (tmp_path / "config.yaml").read_text()
    chosen, others = map(yaml.safe_load, text.split("# as by default\n"))
    assert chosen == {
        "lr": 1.0,
        "lr_warmup_iters": 2,
        "save": str(tmp_path),
        "report_to": ["none"],
    }
    assert chosen | others == yaml.safe_load(text) == run.config()


def test_a_resumed_run_names_its_other_options(tmp_path, caplog):
    caplog.set_level("INFO", logger="mindspeed.training.loop")
    first = Recorded(save=str(tmp_path))
    first.loop.run(first)
    assert "other options" not in caplog.text
    resumed = Recorded(save=str(tmp_path), start=3, min_lr=0.5)
    resumed.loop.run(resumed)
    assert "resumed with other options than before: min_lr 0.0 -> 0.5" in caplog.text
    caplog.clear()
    before = {"training": {"lr": 1, "min_lr": 0.5, "deep": {"a": None, "b": 2}}, "model": None}
    after = {"training": {"lr": 1, "min_lr": 0.1, "deep": {"a": 1, "b": 2}}, "model": {"new": 1}}
    _log_changes(before, after)
    changes = (
        "training.min_lr 0.5 -> 0.1, training.deep.a default -> 1, model default -> {'new': 1}"
    )
    assert caplog.messages == [f"resumed with other options than before: {changes}"]
    done = Recorded(save=str(tmp_path), start=STEPS, min_lr=0.25)
    done.loop.run(done)
    assert "min_lr: 0.5" in (tmp_path / "config.yaml").read_text()  # no step had the other value
