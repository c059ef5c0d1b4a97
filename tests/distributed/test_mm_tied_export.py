"""The export of a user's model with tied weights loads strictly."""

import torch
from safetensors.torch import load_file
from torch import nn

from mindspeed.config import build
from mindspeed.fsdp import FsdpOptions, shard
from mindspeed.training.checkpoint_dir import TrainState
from mindspeed_mm.checkpoint import ConvertOptions
from mindspeed_mm.checkpoint.conversion import convert
from mindspeed_mm.training.checkpoint import FsdpCheckpoints
from tests.ranks import run_ranks


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def save(folder: str) -> None:
    model = Tied()
    shard(model, build(FsdpOptions, {"sharding_size": "auto"}))
    optimizer = torch.optim.AdamW(model.parameters())
    FsdpCheckpoints(folder, model, optimizer).save(TrainState(3, has_optimizer=False))


def test_an_export_has_tied_weights_under_all_names(tmp_path):
    run_ranks(save, 2, str(tmp_path / "run"))
    convert(ConvertOptions(load_dir=str(tmp_path / "run"), save_dir=str(tmp_path / "out")))
    (file,) = (tmp_path / "out").glob("*.safetensors")
    state = load_file(file)
    model = Tied()
    nn.init.zeros_(model.embed.weight)
    model.load_state_dict(state, strict=True)
    assert torch.equal(model.head.weight, Tied().embed.weight)
    assert state.keys() == {"embed.weight", "head.weight"}
