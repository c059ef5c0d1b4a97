"""Train small models through mindspeed_mm's train loop, and plain loops as reference."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from mindspeed.config import build
from mindspeed.fsdp import FsdpOptions
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.options import ModelConfig
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin, WeightInitMixin
from mindspeed_mm.training import get_args, move_to_device, train
from mindspeed_mm.training.arguments import Run, Sections
from mindspeed_mm.training.callbacks import Callbacks
from mindspeed_mm.training.options import MmOptions
from tests.distributed.fsdp_model import SEQUENCE, VOCABULARY, Transformer
from tests.mm import tiny
from tests.unit.mindspeed_llm.training.tiny_run import read_checkpoint, read_losses

RATE, DECAY, CLIP = 1e-3, 0.1, 0.5
SAMPLES = 22
"""Not a multiple of a global batch: two epochs end inside of steps."""
STEPS, BATCH = 12, 4


class UserModel(Transformer, MultiModalModule, FSDP2Mixin, WeightInitMixin):
    """A user's model: only the mixins were added."""


class UserData(Dataset[dict[str, torch.Tensor]]):
    """Tokens and images; with `noise`, the images are augmented randomly."""

    def __init__(self, size: int = SAMPLES, noise: float = 0.0) -> None:
        self._noise = noise
        generator = torch.Generator().manual_seed(5)
        self._tokens = torch.randint(VOCABULARY, (size, SEQUENCE + 1), generator=generator)
        self._images = torch.randn(size, SEQUENCE, 5, generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        drawn = torch.randn(()) + random.gauss(0, 1) + np.random.randn()
        images = self._images[number] + self._noise * drawn
        return {"tokens": self._tokens[number], "images": images}


class TinyData(Dataset[dict[str, torch.Tensor]]):
    """Batches of one row for a model of transformers; some have fewer labels than others."""

    def __init__(self, name: str, size: int = SAMPLES) -> None:
        self._name, self._size = name, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        batch = tiny.batch(self._name, rows=1, seed=number)
        batch["labels"][:, : 6 + number % 4] = -100
        return batch


def user_callbacks(shuffle: bool = False, noise: float = 0.0) -> Callbacks:
    """The callbacks of the document, as a user writes them."""

    def model_provider(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(7)
        return UserModel()

    def train_valid_test_datasets_provider() -> Any:
        size, workers = get_args().micro_batch_size, get_args().num_workers or 0
        data = UserData(noise=noise)
        train = DataLoader(data, batch_size=size, shuffle=shuffle, num_workers=workers)
        return train, DataLoader(UserData(8), size), None

    def get_batch(data_iterator: Any) -> Any:
        return move_to_device(next(data_iterator), get_args().params_dtype)

    def loss_func(output_tensor: Any) -> Any:
        logits, targets = output_tensor
        return cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def forward_step(data_iterator: Any, model: Any) -> Any:
        batch = get_batch(data_iterator)
        tokens = batch["tokens"]
        return (model(tokens[:, :-1], batch["images"]), tokens[:, 1:]), loss_func

    return Callbacks(model_provider, train_valid_test_datasets_provider, forward_step)


def tiny_callbacks(name: str) -> Callbacks:
    """Our callbacks for models of transformers, with ready-made batches."""
    from mindspeed_mm.training import transformers_task as task

    def loaders() -> Any:
        return DataLoader(TinyData(name), batch_size=1, collate_fn=lambda rows: rows[0]), None, None

    return Callbacks(task.model_provider, loaders, task.forward_step)


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the flags of a run that the plain loop repeats."""
    return {
        "train_iters": STEPS,
        "global_batch_size": BATCH,
        "lr": RATE,
        "lr_decay_style": "constant",
        "weight_decay": DECAY,
        "clip_grad": CLIP,
        "save": str(folder),
    } | changes


def make_run(
    flags: dict[str, Any], fsdp: dict[str, Any], model: dict[str, Any] | None = None
) -> Run:
    """Return a run."""
    sections = Sections(model=build(ModelConfig, model) if model else None)
    return Run(MmOptions(**flags), build(FsdpOptions, fsdp), sections)


def train_once(run: Run, callbacks: Callbacks) -> int:
    """Train on this rank; return the last iteration."""
    return train(run, callbacks).iteration


@dataclass
class Outcome:
    """The result of a run: loss and gradient norm of every step, and the weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def outcome(folder: Path) -> Outcome:
    """Return the logged values of a run, and the weights of its last checkpoint."""
    log = str(folder / "log.jsonl")
    losses, norms = (read_losses(log, name) for name in ("loss", "grad norm"))
    return Outcome(losses, norms, outcome_weights(folder))


def outcome_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the last checkpoint of a run."""
    tensors = read_checkpoint(folder)
    return {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}


def plain_loop(
    model: Any, data: Any, loss_of: Callable[[Any, Any], torch.Tensor], steps: int = STEPS
) -> Outcome:
    """Train with torch only, one sample at a time."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for index in range(step * BATCH, (step + 1) * BATCH):
            loss = loss_of(model, data[index % len(data)]) / BATCH
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    return Outcome(losses, norms, weights)


def user_loss(model: Any, sample: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of one sample of the user's model."""
    tokens = sample["tokens"][None]
    logits = model(tokens[:, :-1], sample["images"][None])
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def drill_settings(folder: Path, steps: int) -> dict[str, Any]:
    """Return the flags of the user's model in a drill."""
    return options(folder, train_iters=steps)


def train_in_drill(flags: dict[str, Any], folder: str) -> None:
    """Train the user's model as one rank; write its process id and the iteration it starts at."""
    from mindspeed_mm.training.setup import prepare
    from mindspeed_mm.training.trainer import FsdpTrainer

    rank = os.environ["RANK"]
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    sharded = {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"]}
    callbacks = user_callbacks(shuffle=True)
    setup = prepare(make_run(flags, sharded), callbacks)
    if rank == "0":
        Path(folder, "began").write_text(str(setup.state.iteration))
    FsdpTrainer(setup, callbacks).train()
