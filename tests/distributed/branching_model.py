"""A model whose batches select the branches that run, trained in one process or sharded."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed.config import build
from mindspeed.fsdp import FsdpOptions, shard

WIDTH = 6
EXPERTS = 3

Recipe = tuple[tuple[str, ...], tuple[int, ...]]
"""The branches of one micro-batch in the order in which they run, and its experts."""


class Branching(nn.Module):
    """Branches of one shape and of another, layers that always run, experts one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.audio = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.video = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        self.loose = nn.ParameterDict(
            {"one": torch.ones(WIDTH), "two": torch.ones(WIDTH), "never": torch.ones(WIDTH)}
        )

    def forward(self, x: Any, recipe: Recipe) -> Any:
        branches, experts = recipe
        for name in branches:
            x = x + self.get_submodule(name)(x)
        x = x * (self.loose["one"] if experts else self.loose["two"])
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 0:
                for expert in experts:
                    x = x + self.experts[expert](x)
        return x


def new_model() -> Branching:
    """Build the same model on every rank, in float64."""
    torch.manual_seed(11)
    return Branching().double()


@dataclass(frozen=True)
class Case:
    """How the model is sharded, and what runs: by step, by micro-batch, by rank."""

    options: dict[str, Any]
    recipes: tuple[tuple[tuple[Recipe, ...], ...], ...]
    is_reduced_once: bool
    """Reduce gradients in the last micro-batch of a step only."""


@dataclass
class Result:
    """Losses, weights, and the parameters that had a gradient, by step."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    with_gradients: list[set[str]]
    with_state: set[str]


def train(case: Case, rank: int, is_sharded: bool) -> Result:
    """Train as a rank of a sharded model, or what all ranks train in one process."""
    model = new_model()
    if is_sharded:
        shard(model, build(FsdpOptions, case.options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, gradients = [], []
    generator = torch.Generator().manual_seed(3)
    for step in case.recipes:
        total = torch.zeros((), dtype=torch.double)
        for number, ranks in enumerate(step):
            if is_sharded and case.is_reduced_once:
                model.set_requires_gradient_sync(number == len(step) - 1)
            inputs = torch.randn(len(ranks), 4, WIDTH, dtype=torch.double, generator=generator)
            for index, recipe in enumerate(ranks):
                if not is_sharded or rank == index:
                    loss = model(inputs[index], recipe).square().mean() / len(step)
                    # FSDP takes the mean over ranks itself.
                    (loss if is_sharded else loss / len(ranks)).backward()
                    total += loss.detach() / len(ranks)
        if is_sharded:
            dist.all_reduce(total)
        losses.append(total.item())
        gradients.append({n for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    named = dict(model.named_parameters())
    weights = {name: _whole(p).clone() for name, p in named.items()}
    with_state = {name for name, p in named.items() if p in optimizer.state}
    with torch.no_grad():  # as evaluation does
        losses.append(model(inputs[0], case.recipes[0][0][rank]).mean().item())
    return Result(losses, weights, gradients, with_state)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
