"""Checkpoints of sharded models: bit for bit, on other numbers of ranks, whatever is killed."""

from pathlib import Path
from typing import Any

import torch

from tests.drill import Drill, Subject
from tests.mm import runs
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import read_checkpoint

SHARDED = {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"]}
HALF, WHOLE, BATCH = 4, 8, 12
Case = tuple[dict[str, Any], dict[str, Any]]


def train_cases(folder: str, cases: dict[str, Case]) -> None:
    for name, (changes, fsdp) in cases.items():
        flags = runs.options(Path(folder) / name, global_batch_size=BATCH, **changes)
        run = runs.make_run(flags, SHARDED | fsdp)
        runs.train_once(run, runs.user_callbacks(shuffle=True))


def go_on(folder: Path) -> dict[str, Any]:
    return {"load": str(folder / "half"), "train_iters": WHOLE}


def test_other_ranks_and_other_shards_go_on(tmp_path: Path) -> None:
    cases: dict[str, Case] = {
        "whole": ({"train_iters": WHOLE}, {}),
        "half": ({"train_iters": HALF, "async_save": True, "save_interval": 2}, {}),
        "same": (go_on(tmp_path), {}),
        "copies": (go_on(tmp_path), {"sharding_size": 2, "reshard_after_forward": False}),
    }
    run_ranks(train_cases, 4, str(tmp_path), cases)
    run_ranks(train_cases, 2, str(tmp_path), {"two": (go_on(tmp_path), {})})
    run_ranks(train_cases, 3, str(tmp_path), {"three": (go_on(tmp_path), {"sharding_size": 1})})
    expected = read_checkpoint(tmp_path / "whole")
    assert any(name.endswith("exp_avg_sq") for name in expected)
    for name in ("same", "copies", "two", "three"):
        found = read_checkpoint(tmp_path / name)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            if name == "same":
                assert torch.equal(found[key], tensor), key
            else:  # sums over ranks are in another order
                torch.testing.assert_close(found[key], tensor, atol=1e-5, rtol=1e-4, msg=key)
    kept = sorted(path.name for path in (tmp_path / "half").glob("*iter_*"))
    assert kept == ["iter_0000002", "iter_0000004"]


def test_three_kills_lose_nothing(tmp_path: Path) -> None:
    subject = Subject(runs.drill_settings, runs.train_in_drill)
    kills = Drill(tmp_path, kills=3, seed=3, subject=subject).run()
    assert len(kills) == 3 and kills[1].committed > 0, "nothing was there to lose"
