"""Training of sharded vision-language models on ranks, for tests."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mindspeed.config import build
from mindspeed.fsdp import FsdpOptions
from mindspeed_mm.models import weights
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.models.transformers_model import TransformersModel
from tests.mm import tiny

STEPS, ROWS = 20, 4


def train(model: Any, name: str, rank: int = 0, world: int = 1, length: int = 16) -> list[float]:
    """Take AdamW steps on this rank's rows of every batch; return the losses of global batches."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses = []
    rows = ROWS // world
    for step in range(STEPS):
        batch = part(tiny.batch(name, ROWS, length, seed=step), rank, rows)
        loss = model(**batch)["loss"]
        loss.backward()
        losses.append(_mean(loss, world))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def part(batch: dict[str, Any], rank: int, rows: int) -> dict[str, Any]:
    """Return a rank's rows of a batch; images of a row are contiguous."""
    total = len(batch["input_ids"])
    return {
        name: tensor.unflatten(0, (total, -1))[rank * rows : (rank + 1) * rows].flatten(0, 1)
        for name, tensor in batch.items()
    }


def full_weights(model: Any) -> dict[str, torch.Tensor]:
    """Gather the weights."""
    found = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = tensor.detach().clone()
    return found


def train_sharded(cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Shard and train a folder's model for every (name, folder, model section, FSDP options)."""
    found = []
    for name, folder, section, values in cases:
        config = build(ModelConfig, {"init_from_hf_path": folder, **section})
        model = TransformersModel(config)
        model.fully_shard(fsdp2_config=build(FsdpOptions, values))
        if config.init_model_with_meta_device:
            weights.materialize(model)
            weights.load_pretrained(model, folder)
        losses = train(model, name, dist.get_rank(), dist.get_world_size())
        found.append((losses, full_weights(model)))
    return found


def _mean(loss: torch.Tensor, world: int) -> float:
    mean = loss.detach() / world
    if world > 1:
        dist.all_reduce(mean)
    return float(mean)
