"""Checkpoints of buffers that differ between ranks, such as those of a batch norm."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mindspeed_mm.training.callbacks import Callbacks
from tests.mm import runs
from tests.ranks import run_ranks
from tests.unit.mindspeed_llm.training.tiny_run import read_checkpoint

HALF, WHOLE = 2, 4


class Normed(nn.Module):
    """A model with running means."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def train(folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train in one run, and in two; return this rank's buffers at the end of each."""
    data = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    built: list[nn.Module] = []

    def provide() -> nn.Module:
        built.append(Normed())
        return built[-1]

    def loaders() -> Any:
        return DataLoader(TensorDataset(data), batch_size=4), None, None

    def step(batches: Any, model: Any) -> Any:
        (x,) = next(batches)
        return model(x), lambda y: (y.flatten() - x.sum(1)).square().mean()

    found = {}
    half = {"train_iters": HALF}
    again = {"train_iters": WHOLE, "load": f"{folder}/half"}
    whole = {"train_iters": WHOLE, "save_interval": HALF}
    for name, changes in (("whole", whole), ("half", half), ("resumed", again)):
        base = {"global_batch_size": 8, "micro_batch_size": 4}
        flags = runs.options(Path(folder) / name, **base | changes)
        runs.train_once(
            runs.make_run(flags, {"sharding_size": "auto"}), Callbacks(provide, loaders, step)
        )
        found[name] = {key: buffer.clone() for key, buffer in built[-1].named_buffers()}
    return found


def test_a_resumed_run_has_the_buffers_of_an_uninterrupted_one(tmp_path: Path) -> None:
    ranks = run_ranks(train, 2, str(tmp_path))
    whole, resumed = (read_checkpoint(tmp_path / name) for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
    for found in ranks:
        for key, buffer in found["resumed"].items():
            assert torch.equal(buffer, found["whole"][key]), key
            assert torch.equal(buffer, whole[f"model.{key}"]), key
