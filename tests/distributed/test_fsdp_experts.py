"""Expert-parallel training equals training in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor

from mindspeed.config import build
from mindspeed.fsdp import FsdpOptions, shard
from tests.distributed.fsdp_model import held_bytes
from tests.ranks import run_ranks

EXPERTS, HIDDEN, WIDE, TOKENS = 4, 6, 8, 8
STEPS = 3


class Experts(nn.Module):
    """Every expert sees every token, weighted by the router."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDE))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDE, HIDDEN))
        self.scale = nn.Parameter(torch.rand(EXPERTS))

    def forward(self, x: Any, weights: Any) -> Any:
        y = torch.einsum("th,ehw->etw", x, self.up).tanh()
        return torch.einsum("etw,ewh,e,te->th", y, self.down, self.scale, weights)

    def ep_forward(self, ep_group: Any, x: Any, weights: Any) -> Any:
        rank, size = dist.get_rank(ep_group), dist.get_world_size(ep_group)
        spread = [torch.zeros_like(t).repeat(size, 1) for t in (x, weights)]
        mine = slice(rank * len(x), (rank + 1) * len(x))
        for everywhere, here in zip(spread, (x, weights)):
            everywhere[mine] = here
        tokens, routes = (all_reduce(t, group=ep_group) for t in spread)
        local = routes.chunk(size, dim=1)[rank]
        return all_reduce(Experts.forward(self, tokens, local), group=ep_group)[mine]


class Model(nn.Module):
    """A router and experts between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, EXPERTS)
        self.experts, self.last = Experts(), nn.Linear(HIDDEN, 1)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        return self.last(x + self.experts(x, self.router(x).softmax(-1)))


def steps(rank: int = 0, world: int = 1, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train on this rank's tokens; return full weights, of experts those of this rank."""
    torch.manual_seed(3)
    model = Model()
    plan = shard(model, build(FsdpOptions, values)) if values is not None else None
    held = held_bytes(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(STEPS):
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))
        model(x.chunk(world)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: full(p.detach()) for name, p in model.named_parameters()}
    return weights | {"bytes": (plan.bytes_per_rank if plan else held, held)}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_rank(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [steps(dist.get_rank(), dist.get_world_size(), values) for values in cases]


@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2)])
def test_expert_parallel_equals_one_process(world, size):
    expected = steps()
    common = {"sharding_size": "auto", "moe_modules": ["experts"], "expert_parallel_size": size}
    cases = [common, {**common, "reshard_local_experts": False}]
    for rank, outcomes in enumerate(run_ranks(in_rank, world, cases, timeout=300)):
        for weights in outcomes:
            planned, held = weights.pop("bytes")
            assert planned == held
            for name, ours in weights.items():
                theirs = expected[name]
                if name.startswith("experts."):
                    theirs = theirs.chunk(size)[rank % size]
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
