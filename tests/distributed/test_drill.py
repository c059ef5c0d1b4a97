"""Short drills of mindspeed_llm's training; `make drill` runs the long one."""

import os
from pathlib import Path

import pytest

from tests.drill import Drill, posttraining


def test_three_kills_lose_nothing(tmp_path: Path) -> None:
    kills = Drill(tmp_path, kills=3, seed=3).run()
    assert not processes_of(tmp_path), "a process outlived its rank"
    assert len(kills) == 3 and kills[1].committed > 0, "nothing was there to lose"
    assert {kill.save for kill in kills} == {"sync", "async"}


@pytest.mark.parametrize("stage", ["kto", "trl_ppo"])
def test_stages_of_post_training_lose_nothing(tmp_path: Path, stage: str) -> None:
    """A reference and a random completion of every step; actor, critic and rewards."""
    (kill,) = Drill(tmp_path, kills=1, seed=1, subject=posttraining(stage)).run()
    assert kill.left >= kill.committed
    assert not processes_of(tmp_path), "a process, as of the reward function, outlived its rank"


def processes_of(folder: Path) -> list[str]:
    """Return the commands that name a file of this folder or have one open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
            files = [os.readlink(file) for file in (process / "fd").iterdir()]
        except OSError:  # it has ended
            continue
        if process.name != str(os.getpid()) and str(folder) in " ".join([words, *files]):
            found.append(words.replace("\0", " "))
    return found
