"""Checkpoints of sharded models: bit-exact resume, other world sizes, kills, damaged files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed.config import ConfigError
from mindspeed_mm.training.callbacks import Callbacks
from tests.distributed.test_fsdp_experts import EXPERTS, HIDDEN, Model
from tests.drill import Drill, Subject
from tests.mm import runs
from tests.ranks import run_ranks
from tests.unit.checkpoint.test_digests import flip
from tests.unit.mindspeed_llm.training.tiny_run import read_checkpoint

SHARDED = {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"]}
HALF, WHOLE, BATCH = 2, 4, 12
FOUR_WAY = {"expert_parallel_size": 4}
Case = tuple[dict[str, Any], dict[str, Any]]


def train_cases(folder: str, cases: dict[str, Case]) -> None:
    for name, (changes, fsdp) in cases.items():
        flags = runs.options(Path(folder) / name, global_batch_size=BATCH, **changes)
        run = runs.make_run(flags, SHARDED | fsdp)
        runs.train_once(run, runs.user_callbacks(shuffle=True, noise=0.5))


def resume(folder: Path) -> dict[str, Any]:
    return {"load": str(folder / "half"), "train_iters": WHOLE}


def test_resume_on_other_ranks_and_meshes(tmp_path: Path) -> None:
    cases: dict[str, Case] = {
        "whole": ({"train_iters": WHOLE}, {}),
        "half": ({"train_iters": HALF, "async_save": True, "save_interval": 1}, {}),
        # Random augmentation does not depend on the number of workers.
        "same": (resume(tmp_path) | {"num_workers": 1}, {}),
        "copies": (resume(tmp_path), {"sharding_size": 2, "reshard_after_forward": False}),
    }
    run_ranks(train_cases, 4, str(tmp_path), cases, timeout=240)
    run_ranks(train_cases, 2, str(tmp_path), {"two": (resume(tmp_path), {})})
    run_ranks(train_cases, 3, str(tmp_path), {"three": (resume(tmp_path), {"sharding_size": 1})})
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
    assert kept == ["iter_0000001", "iter_0000002"]


def flip_and_resume(folder: Path) -> list[str]:
    """Flip one bit in each file of a checkpoint in turn; return the errors of the resume."""
    errors = []
    train_cases(str(folder), {"run": ({"train_iters": 1}, {})})
    for path in sorted((folder / "run/iter_0000001").iterdir()):
        keep = path.read_bytes()
        if torch.distributed.get_rank() == 0:
            flip(path)
        torch.distributed.barrier()
        with pytest.raises(ConfigError) as raised:
            train_cases(str(folder), {"run": ({"train_iters": 2}, {})})
        errors.append(str(raised.value))
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            path.write_bytes(keep)
        torch.distributed.barrier()
    train_cases(str(folder), {"run": ({"train_iters": 2}, {})})
    return errors


def test_a_flipped_bit_is_reported_by_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(flip_and_resume, 2, tmp_path)
    assert first == second
    names = [".metadata", "__0_0.distcp", "__1_0.distcp", "digests.json", "training.json"]
    assert [text.partition(": ")[0].rpartition("/")[2] for text in first] == names
    assert all("is damaged" in text for text in first)


class ExpertData(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(number))


def train_experts(folder: str, cases: dict[str, Case]) -> None:
    def provide() -> torch.nn.Module:
        torch.manual_seed(3)
        return Model()

    def data() -> Any:
        return torch.utils.data.DataLoader(ExpertData(), batch_size=2), None, None

    def step(batches: Any, model: Any) -> Any:
        return model(next(batches)).square().mean(), lambda loss: loss

    for name, (changes, fsdp) in cases.items():
        flags = runs.options(Path(folder) / name, global_batch_size=8, micro_batch_size=2)
        run = runs.make_run(flags | changes, {"sharding_size": "auto"} | fsdp)
        runs.train_once(run, Callbacks(provide, data, step))


def test_expert_parallel_checkpoints_hold_all_experts(tmp_path: Path) -> None:
    """Each expert-parallel mesh resumes from another one; the result equals plain sharding."""
    shared = {"moe_modules": ["experts"], "expert_parallel_size": 2}
    copied = shared | {"reshard_local_experts": False}
    cases: dict[str, Case] = {
        "plain": ({"train_iters": 4}, {}),
        "shared": ({"train_iters": 2}, shared),
        "copied": ({"train_iters": 3, "load": f"{tmp_path}/shared"}, copied),
        "all": ({"train_iters": 4, "load": f"{tmp_path}/copied"}, shared | FOUR_WAY),
    }
    run_ranks(train_experts, 4, str(tmp_path), cases, timeout=240)
    expected, found = (read_checkpoint(tmp_path / name) for name in ("plain", "all"))
    assert expected["model.experts.up"].shape[0] == EXPERTS
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, atol=1e-5, rtol=1e-4, msg=key)


def test_three_kills_lose_no_checkpoint(tmp_path: Path) -> None:
    subject = Subject(runs.drill_settings, runs.train_in_drill)
    kills = Drill(tmp_path, kills=3, seed=3, subject=subject).run()
    assert len(kills) == 3 and kills[1].committed > 0, "there was no checkpoint to lose"
