"""How a run ends before its last step: exit codes, one line, which checkpoint is good."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.config import ConfigError
from mindspeed.training.entry import LAUNCHED, POLL_SECONDS, Stopped, run_rank
from mindspeed.training.metrics import StepResult
from mindspeed.training.options import RunOptions
from mindspeed_llm.training.course import Course, NotANumber
from mindspeed_llm.training.folders import Progress, newest, newest_good, read_progress
from tests.ranks import run_ranks


class Folders:
    """Checkpoints without weights."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(self, progress: Progress, **how: Any) -> None:
        folder = self._root / f"iter_{progress.iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "training.json").write_text(json.dumps(asdict(progress)))
        tracker = self._root / "latest_checkpointed_iteration.txt"
        tracker.write_text(str(progress.iteration))

    def poll(self) -> None:
        """Nothing is saved in the background."""

    finish = poll


class Scripted(Course):
    """Steps whose losses are not numbers from one iteration on, and one that gets a signal."""

    def __init__(self, root: Path, *, bad: range = range(0), asked: int = 0, **flags: Any) -> None:
        self._bad, self._asked = bad, asked
        options = RunOptions(lr=1.0, save=str(root), **{"train_iters": 12} | flags)
        found = newest(root)
        progress = Progress() if found is None else read_progress(found)
        optimizer = SimpleNamespace(param_groups=[{}])
        steps = options.train_iters or 0
        kind = {"steps": steps, "batch": 1, "rank": 0, "world": 1}
        super().__init__(options, Folders(root), optimizer, progress, **kind)

    def learn(self, progress: Progress, stop: bool) -> StepResult:
        number = progress.iteration + 1
        is_finite = number not in self._bad
        if number == self._asked:
            os.kill(os.getpid(), signal.SIGTERM)
        return StepResult({"loss": 1.0}, 1.0, 1, 1.0, is_finite, is_finite, stop)

    def evaluate(self) -> None:
        return None

    def note(self, iteration: int, consumed: int) -> Progress:
        return Progress(iteration, consumed)


def _folders(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in root.glob("iter_*"))


def test_nan_names_the_checkpoint_before_the_streak_and_saves_none_in_it(tmp_path: Path) -> None:
    with pytest.raises(NotANumber) as caught:
        Scripted(tmp_path, bad=range(6, 99), save_interval=2, max_nan_iterations=5).run()
    assert str(caught.value) == (
        "the loss or its gradient was not a number in 5 steps up to iteration 10: lower --lr, or "
        "check the data of these steps; the newest checkpoint from before is "
        f"{tmp_path}/iter_0000004"
    )
    assert _folders(tmp_path) == [2, 4]


def test_nan_names_no_checkpoint_that_was_not_written(tmp_path: Path) -> None:
    with pytest.raises(NotANumber, match="; none was saved before$"):
        Scripted(tmp_path, bad=range(1, 99), save_interval=2, max_nan_iterations=5).run()
    assert _folders(tmp_path) == []


def test_a_streak_that_ends_delays_a_save_only(tmp_path: Path) -> None:
    Scripted(tmp_path, bad=range(4, 7), save_interval=2, max_nan_iterations=5).run()
    assert _folders(tmp_path) == [2, 8, 10, 12]


def test_a_checkpoint_saved_in_a_streak_is_not_called_good(tmp_path: Path) -> None:
    flags = {"bad": range(6, 99), "save_interval": 4, "max_nan_iterations": 5}
    with pytest.raises(Stopped):
        Scripted(tmp_path, asked=6, **flags).run()
    assert _folders(tmp_path) == [4, 7] and read_progress(tmp_path / "iter_0000007").nan_streak == 2
    assert newest_good(tmp_path, 99) == tmp_path / "iter_0000004"
    with pytest.raises(NotANumber, match="in 5 steps up to iteration 10.*/iter_0000004$"):
        Scripted(tmp_path, **flags).run()


def test_a_run_that_is_asked_to_stop_says_so_by_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        Scripted(tmp_path, asked=5).run()
    assert caught.value.code == 143
    assert isinstance(caught.value, Stopped) and caught.value.iteration == 6
    assert _folders(tmp_path) == [6]


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
    assert all("error: the loss or its gradient was not a number" in line for line in lines)


def _fail_with_groups(how: str) -> tuple[int | str, list[str]]:
    """End as one of two ranks with Megatron's groups, in cycles and frames; return what is left."""
    import torch
    from megatron.core import parallel_state

    class Model:
        """Holds itself and a group, as modules with hooks do."""

    def train() -> None:
        parallel_state.initialize_model_parallel(2)
        model: Any = Model()
        model.itself, model.group = model, torch.distributed.new_group()
        torch.distributed.all_reduce(torch.ones(1), group=model.group)
        try:
            raise OSError("damaged")
        except OSError as error:
            if how == "wrong":
                raise ConfigError(f"cannot be loaded ({error})") from None
            if how == "stopped":
                raise Stopped(signal.SIGTERM, 3) from None

    code: int | str
    try:
        code = run_rank(train)
    except ConfigError as error:
        code = str(error)
    tasks = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), **ALONE)
    return code, [name for name in tasks if "runloop" in name]


ALONE = {"rank": 0, "world_size": 1}
"""For the end of the test's rank, which leaves a group."""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
@pytest.mark.parametrize(("how", "code"), [("wrong", 2), ("stopped", 143), ("well", 0)])
def test_no_thread_of_a_group_is_left(how: str, code: int) -> None:
    """One that is there when the interpreter ends aborts it now and then."""
    first, second = run_ranks(_fail_with_groups, 2, how)
    assert first == ("cannot be loaded (damaged)" if how == "wrong" else code, [])
    assert second == (code, [])


# A rank that trains until it is asked to stop, and the launcher that started it.
RANK = """
import os, sys, time
from pathlib import Path
from mindspeed.training.entry import run_rank
from mindspeed.training.entry import StopRequest

def train():
    with StopRequest() as request:
        Path("rank").write_text(str(os.getpid()))
        while not request.is_set and not Path("go").exists():
            time.sleep(0.05)
        Path("ended.new").write_text("asked to stop" if request.is_set else "done")
        os.rename("ended.new", "ended")

sys.exit(run_rank(train))
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, 'rank.py'])"


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_rank_stops_when_its_launcher_is_killed(tmp_path: Path, is_launched: bool) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    marks = {LAUNCHED: "True"} if is_launched else {}
    with (tmp_path / "said").open("w") as said:
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != LAUNCHED} | marks,
            stdout=said,
        )
    _wait_for(tmp_path / "rank")
    launcher.kill()
    launcher.wait()
    if not is_launched:
        time.sleep(2 * POLL_SECONDS)
        (tmp_path / "go").touch()
    _wait_for(tmp_path / "ended")
    expected = f"the launcher (process {launcher.pid}) has ended: stopping\n"
    assert (tmp_path / "ended").read_text() == ("asked to stop" if is_launched else "done")
    assert (tmp_path / "said").read_text() == (expected if is_launched else "")


def _wait_for(file: Path) -> None:
    end = time.monotonic() + 120
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
