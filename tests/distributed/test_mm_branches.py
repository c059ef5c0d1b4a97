"""The multimodal trainer on samples that use different branches of a model per rank."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mindspeed_mm.training.callbacks import Callbacks
from tests.mm import runs
from tests.ranks import run_ranks

WIDTH, STEPS, SAMPLES = 6, 8, 22
BRANCHES = ("image", "audio", "none", "image", "video", "none", "none")
FSDP = {"sharding_size": "auto", "sub_modules_to_wrap": ["image", "audio", "video", "never"]}


class Branches(nn.Module):
    """Encoders of which a sample uses one or none; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.image, self.audio = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.video = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))
        self.never = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Any, kind: str) -> Any:
        if kind != "none":
            x = x + torch.tanh(self.get_submodule(kind)(x))
        return self.head(x).square().mean()


class Samples(Dataset[dict[str, Any]]):
    """Numbers, and the branch for them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(1, WIDTH, generator=generator)
        return {"x": x, "kind": BRANCHES[number % len(BRANCHES)]}


def train(folder: str) -> None:
    def forward_step(batches: Any, model: Any) -> Any:
        batch = next(batches)
        return model(batch["x"][0], batch["kind"][0]), lambda loss: loss

    def loaders() -> Any:
        return DataLoader(Samples(), batch_size=1), None, None

    flags = {"train_iters": STEPS, "save": folder, "log_file": f"{folder}/log.jsonl"}
    flags = runs.options(folder, **flags)
    runs.train_once(runs.make_run(flags, FSDP), Callbacks(Branches, loaders, forward_step))


def test_losses_norms_and_weights_equal_one_process(tmp_path):
    alone = runs.plain_loop(
        Branches(), Samples(), lambda model, one: model(one["x"], one["kind"]), STEPS
    )
    run_ranks(train, 2, str(tmp_path))
    found = runs.outcome(tmp_path)
    assert found.losses == pytest.approx(alone.losses, abs=1e-6)
    assert found.norms == pytest.approx(alone.norms, abs=1e-6)
    torch.testing.assert_close(found.weights, alone.weights, atol=1e-6, rtol=1e-5)
    assert torch.equal(found.weights["never.weight"], Branches().never.weight)
    states = {name.split(".")[1] for name in runs.read_checkpoint(tmp_path) if "exp_avg" in name}
    assert states == {"image", "audio", "video", "head"}
