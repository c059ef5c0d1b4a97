"""Kills trainings of two ranks again and again, and sees what is lost: nothing may be.

`make drill` does it 20 times, `make drill LONG=1` 100 times, of which a third hit the multimodal
suite and a third the stages of post-training; `python -m tests.drill --kills 5 --seed 7` repeats a
shorter one, and `--only dpo grpo` kills these so often each.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mindspeed.training.checkpoint_dir import STAGING, latest_checkpoint, read_state
from tests.llm import letters
from tests.llm import preferences as rows
from tests.ranks import RankFailed, run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import (
    make_model,
    make_samples,
    read_checkpoint,
    settings,
    write_samples,
)

SHORT, LONG = 20, 100
STEPS_A_KILL = 2
PREFERENCES = ("dpo", "simpo", "kto", "orm", "prm")
ROLLOUTS = ("trl_ppo", "grpo")
PATIENCE = 900.0


@dataclass(frozen=True)
class Kill:
    """What one kill met, and what it left."""

    number: int
    save: str
    """How this run saves: sync or async."""
    victims: str
    began: int
    """The iteration that the run went on from."""
    committed: int
    """The newest checkpoint when the kill came."""
    inside_save: bool
    left: int
    """The newest checkpoint afterwards."""


class LostCheckpoint(AssertionError):
    """A committed checkpoint is gone, or a run did not go on from it."""


@dataclass(frozen=True)
class Subject:
    """What is trained: its options for so many steps, and what each rank runs with them."""

    settings: Callable[[Path, int], dict[str, Any]]
    train: Callable[[dict[str, Any], str], None]


def language_model(folder: Path, steps: int) -> dict[str, Any]:
    """Make a tiny model and data for it; return the options of its training."""
    model = make_model(folder / "hf", num_hidden_layers=2)
    data = write_samples(folder / "data", make_samples(24))
    more = {"train_iters": steps, "use_distributed_optimizer": True, "log_file": None}
    return settings(model, data, folder, **more)


def preferences(stage: str, folder: Path, steps: int) -> dict[str, Any]:
    """Return the options of a stage on preferences."""
    if stage == "kto":
        data = rows.write_unpaired(folder / "data", rows.make_unpaired())
    elif stage == "prm":
        data = rows.write_steps(folder / "data", rows.make_steps(20))
    else:
        data = rows.write_pairs(folder / "data", rows.make_pairs())
    more = {"train_iters": steps, "use_distributed_optimizer": True, "log_file": None}
    return rows.settings(rows.save_llama(folder / "hf"), data, folder, stage=stage, **more)


def rollouts(stage: str, folder: Path, steps: int) -> dict[str, Any]:
    """Return the options of a stage on sampled completions, with a reward function."""
    model, data = letters.save_model(folder / "hf"), letters.write_prompts(folder / "data")
    more = {"stage": stage, "train_iters": steps, "log_file": None, "kl_target": 0.01}
    more |= {"micro_batch_size": 1, "num_mini_batches": 2}
    function = letters.write_function(folder)
    return letters.settings(model, data, folder, reward_fn=function, **more)


class Drill:
    """One training, killed at random moments until it is done."""

    def __init__(
        self, folder: Path, kills: int, seed: int, subject: "Subject | None" = None
    ) -> None:
        self._random = random.Random(seed)
        self._kills, self._folder = kills, folder
        steps = STEPS_A_KILL * (kills + 2)
        subject = subject or Subject(language_model, train)
        self._values, self._rank = subject.settings(folder, steps), subject.train

    def run(self, tell: Callable[[Kill], None] | None = None) -> list[Kill]:
        """Kill, resume, kill, ...; then compare with an undisturbed run."""
        whole, broken = self._folder / "whole", self._folder / "broken"
        self._train(whole, "sync", interval=None)
        kills = []
        for number in range(1, self._kills + 1):
            kills.append(self._kill(number, broken))
            if tell is not None:
                tell(kills[-1])
        self._train(broken, "sync")
        expected, found = read_checkpoint(whole), read_checkpoint(broken)
        assert expected.keys() == found.keys() and any("exp_avg" in name for name in found)
        different = [n for n, values in expected.items() if not torch.equal(values, found[n])]
        assert not different, f"not the bits of an undisturbed run: {different[:5]}"
        return kills

    def _train(self, saved: Path, how: str, interval: int | None = 2) -> None:
        values = self._values | {"save": str(saved), "async_save": how == "async"}
        values["save_interval"] = interval
        run_ranks(self._rank, 2, values, str(self._folder), timeout=PATIENCE)

    def _kill(self, number: int, saved: Path) -> Kill:
        """Start or resume, kill at some moment, and check what is left."""
        how = self._random.choice(["sync", "async"])
        victims = self._random.choice([[0], [1], [0, 1]])
        before = _iteration(saved)
        for name in ("pid-0", "pid-1", "began"):
            (self._folder / name).unlink(missing_ok=True)
        watcher = _Watcher(self._folder, saved, self._moment(number, before), victims)
        watcher.start()
        try:
            self._train(saved, how)
        except RankFailed:
            if not watcher.is_done:
                raise
        watcher.over.set()
        watcher.join()
        if not watcher.is_done:
            raise AssertionError(f"kill {number}: the run ended before its moment came")
        first = self._folder / "began"  # not there if the kill came before the weights
        began = int(first.read_text()) if first.is_file() else before
        left = _iteration(saved)
        if began < before or left < watcher.committed:
            raise LostCheckpoint(f"kill {number}: began {began} of {before}, left {left}")
        gone = {path for path in watcher.folders if not (path / "training.json").is_file()}
        if gone:
            raise LostCheckpoint(f"kill {number}: {gone} were committed and are gone")
        names = " and ".join(map(str, victims))
        return Kill(number, how, names, began, watcher.committed, watcher.was_inside_save, left)

    def _moment(self, number: int, before: int) -> "Moment":
        """Take turns: at any step, inside a save, just after one; and some time later."""
        kind = ("step", "save", "commit")[number % 3]
        steps = self._random.randint(0, STEPS_A_KILL - 1) if kind == "step" else 0
        return Moment(kind, before, steps, self._random.uniform(0, 0.15))


@dataclass(frozen=True)
class Moment:
    """When to kill a run that goes on after `before`: some steps later, or at its next save."""

    kind: str
    before: int
    steps: int
    delay: float


class _Watcher(threading.Thread):
    """Waits for the moment, notes what is committed, and kills."""

    def __init__(self, folder: Path, saved: Path, moment: Moment, victims: list[int]) -> None:
        super().__init__(daemon=True)
        self._folder, self._saved, self._moment = folder, saved, moment
        self._victims = victims
        self._left_over = set(saved.glob(f".iter_*{STAGING}*"))
        self.committed, self.folders = 0, set[Path]()
        self.was_inside_save = self.is_done = False
        self.over = threading.Event()

    def run(self) -> None:
        pids = [self._wait_for_pid(rank) for rank in (0, 1)]
        while not self._is_time():
            if self.over.wait(0.002):
                return
        time.sleep(self._moment.delay)
        self.committed = _iteration(self._saved)
        self.folders = {p for p in self._saved.glob("iter_*") if _number(p) <= self.committed}
        self.was_inside_save = self._is_saving()
        self.is_done = True
        for rank in self._victims:
            os.kill(pids[rank], signal.SIGKILL)

    def _wait_for_pid(self, rank: int) -> int:
        file = self._folder / f"pid-{rank}"
        while not (file.is_file() and file.read_text()) and not self.over.wait(0.01):
            pass
        return int(file.read_text())

    def _is_time(self) -> bool:
        if self._moment.kind == "save":
            return self._is_saving()
        if self._moment.kind == "commit":
            return _iteration(self._saved) > self._moment.before
        log = self._saved / "log.jsonl"
        steps = log.read_text().count("\n") if log.is_file() else 0
        return steps >= self._moment.before + self._moment.steps

    def _is_saving(self) -> bool:
        return bool(set(self._saved.glob(f".iter_*{STAGING}*")) - self._left_over)


def train(values: dict[str, Any], folder: str) -> None:
    """Train as one rank, telling its process and where it begins."""
    from mindspeed_llm.tasks.posttrain.launcher import AutoTrainer
    from mindspeed_llm.training.options import TrainOptions

    rank = os.environ["RANK"]
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    auto = AutoTrainer(TrainOptions(**values))
    if rank == "0":
        Path(folder, "began").write_text(str(auto.trainer.training.state.iteration))
    auto.train()


def _iteration(saved: Path) -> int:
    folder = latest_checkpoint(saved)
    return 0 if folder is None else read_state(folder).iteration


def _number(path: Path) -> int:
    return int(path.name.removeprefix("iter_"))


def subjects() -> dict[str, Subject]:
    """Return what is killed, by name."""
    from tests.mm import runs

    multimodal = Subject(runs.drill_settings, runs.train_in_drill)
    found = {"llm": Subject(language_model, train), "mm": multimodal}
    return found | {stage: posttraining(stage) for stage in (*PREFERENCES, *ROLLOUTS)}


def posttraining(stage: str) -> Subject:
    """Return a stage of post-training."""
    make = preferences if stage in PREFERENCES else rollouts
    return Subject(partial(make, stage), train)


def shares(kills: int) -> dict[str, int]:
    """Share kills out: a third to the multimodal suite, one in twenty to each other stage."""
    few = {"mm": kills // 3} | dict.fromkeys((*PREFERENCES, *ROLLOUTS), kills // 20)
    return {"llm": kills - sum(few.values())} | few


def main() -> int:
    """Run a drill and print what every kill met."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    parser = argparse.ArgumentParser(prog="python -m tests.drill", description=__doc__)
    parser.add_argument("--kills", type=int, help=f"how many (default: {SHORT})")
    parser.add_argument("--long", action="store_true", help=f"{LONG} of them")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    names = tuple(shares(SHORT))
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        metavar="SUITE",
        help=f"so many kills of each of these: {', '.join(names)}",
    )
    arguments = parser.parse_args()
    total = arguments.kills or (LONG if arguments.long else SHORT)
    kills_of = dict.fromkeys(arguments.only, total) if arguments.only else shares(total)
    shown, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115  # hides what ranks say
    console = Console(file=shown)
    console.print(f"seed {arguments.seed}")
    console.print(" | ".join(["suite", *(field.name for field in fields(Kill))]))
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    kills = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("kills", total=sum(kills_of.values()))

        def tell(suite: str, kill: Kill) -> None:
            progress.console.print(" | ".join([suite, *map(str, astuple(kill))]), highlight=False)
            progress.advance(task)

        for suite, count in kills_of.items():
            if not count:
                continue
            with tempfile.TemporaryDirectory() as folder:
                seed = arguments.seed + names.index(suite)  # other victims in every suite
                drill = Drill(Path(folder), count, seed, subjects()[suite])
                kills += drill.run(partial(tell, suite))
    sys.stdout = shown
    inside = sum(kill.inside_save for kill in kills)
    print(
        f"{len(kills)} kills, {inside} inside a save: every run went on, no committed checkpoint "
        "is lost, and the weights are bit for bit those of an undisturbed run"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
