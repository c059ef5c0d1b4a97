"""Short drills of mindspeed_llm's training; `make drill` runs the long one."""

from pathlib import Path

import pytest

from tests.drill import Drill, posttraining


def test_three_kills_lose_nothing(tmp_path: Path) -> None:
    kills = Drill(tmp_path, kills=3, seed=3).run()
    assert len(kills) == 3 and kills[1].committed > 0, "nothing was there to lose"
    assert {kill.save for kill in kills} == {"sync", "async"}


@pytest.mark.parametrize("stage", ["kto", "trl_ppo"])
def test_stages_of_post_training_lose_nothing(tmp_path: Path, stage: str) -> None:
    """A reference and a random completion of every step; actor, critic and rewards."""
    (kill,) = Drill(tmp_path, kills=1, seed=1, subject=posttraining(stage)).run()
    assert kill.left >= kill.committed
    assert not processes_of(tmp_path), "the reward function outlived its rank"


def processes_of(folder: Path) -> list[str]:
    """Return the commands that are running with a file of this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue
        if str(folder) in words:
            found.append(words.replace("\0", " "))
    return found
