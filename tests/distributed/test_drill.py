"""A short drill of mindspeed_llm's training; `make drill` runs the long one."""

from pathlib import Path

from tests.drill import Drill


def test_three_kills_lose_nothing(tmp_path: Path) -> None:
    kills = Drill(tmp_path, kills=3, seed=3).run()
    assert len(kills) == 3 and kills[1].committed > 0, "nothing was there to lose"
    assert {kill.save for kill in kills} == {"sync", "async"}
