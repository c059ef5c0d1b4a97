"""Replicated weights and split sequences count once in the loss and the gradient norm."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from mindspeed.config import build
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed.fsdp import FsdpOptions, shard
from mindspeed_mm.training.callbacks import Callbacks
from mindspeed_mm.training.step import FsdpStep
from tests.mm import runs
from tests.ranks import run_ranks

IGNORED, MICRO_BATCHES, CLIP = -100, 2, 0.3
KINDS = {"copies of the weights": 1, "parts of a sequence": 2}
"""Ranks that split a sequence."""
COMPLEX = (torch.complex64, torch.complex128)


def losses(model: Any, sample: dict[str, torch.Tensor], part: int, parts: int) -> Any:
    """Return the loss sum of a part of a sample's tokens, and their count."""
    tokens = sample["tokens"][None]
    targets = tokens[:, 1:].clone()
    if parts > 1:  # parts of different sizes
        is_first = torch.arange(targets.shape[1]) % 3 == 0
        targets[:, is_first if part else ~is_first] = IGNORED
    logits = model(tokens[:, :-1], sample["images"][None])
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != IGNORED).sum()


def take_steps() -> dict[str, list[float]]:
    from megatron.core import parallel_state

    found = {}
    world, rank = dist.get_world_size(), dist.get_rank()
    for kind, cp in KINDS.items():
        torch.manual_seed(7)
        model = runs.UserModel()
        size = 1 if cp == 1 else "auto"
        shard(model, build(FsdpOptions, {"sharding_size": size}))
        trained = [p for p in model.parameters() if p.requires_grad]
        before = [p.full_tensor().detach().clone() for p in trained]
        optimizer = torch.optim.SGD(trained, lr=1.0)
        parallel_state.initialize_model_parallel(context_parallel_size=cp)

        def loss_func(output: Any) -> Any:
            total, count = output
            return total, count, {"loss": torch.stack([total.detach(), count])}

        def forward_step(batches: Any, model: Any, cp: int = cp) -> Any:
            part = dist.get_rank() if cp > 1 else 0
            return losses(model, next(batches), part, cp), loss_func

        callbacks = Callbacks(lambda: None, lambda: None, forward_step)
        dp = world // cp
        dims = ParallelDims(world=world, rank=rank, cp=cp, global_batch_size=MICRO_BATCHES * dp)
        stepper = FsdpStep(model, optimizer, callbacks, dims, clip=CLIP, per_token=False)
        data = runs.UserData()
        mine = (data[dp * number + rank // cp] for number in range(MICRO_BATCHES))
        result = stepper.train(mine, lambda: False).wait()
        steps = [p.full_tensor().detach() - old for p, old in zip(trained, before)]
        length = torch.nn.utils.get_total_norm(steps).item()
        found[kind] = [result.metrics["loss"], result.grad_norm, length]
        parallel_state.destroy_model_parallel()
    found |= {str(dtype): complex_step(dtype) for dtype in COMPLEX}
    return found


class Spectral(torch.nn.Module):
    """Weights of frequencies, as in a Fourier neural operator."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.filter = torch.nn.Parameter(torch.randn(9, dtype=dtype, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=16).square().mean()


def signals(number: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, dtype=dtype.to_real(), generator=generator)


def complex_step(dtype: torch.dtype) -> list[float]:
    """Return the norm of the gradient of complex weights, and that of the clipped update."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model: Any = Spectral(dtype)
    shard(model, build(FsdpOptions, {"sharding_size": "auto"}))
    before = model.filter.full_tensor().detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    callbacks = Callbacks(None, None, lambda data, m: (m(next(data)), lambda x: x))  # type: ignore[arg-type]
    dims = ParallelDims(world=world, rank=rank)
    stepper = FsdpStep(model, optimizer, callbacks, dims, clip=CLIP, per_token=False)
    result = stepper.train(iter([signals(rank, dtype)]), lambda: False).wait()
    update = model.filter.full_tensor().detach() - before
    return [result.grad_norm, torch.linalg.vector_norm(update).item()]


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_norm_of_complex_and_of_double_weights(found: Any, dtype: torch.dtype) -> None:
    model = Spectral(dtype)
    torch.stack([model(signals(rank, dtype)) for rank in range(2)]).mean().backward()
    norm = torch.linalg.vector_norm(model.filter.grad).item()
    assert norm > CLIP, "nothing to clip"
    for rank in found:
        assert rank[str(dtype)] == pytest.approx([norm, CLIP], abs=1e-5)


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[float]]]:
    return run_ranks(take_steps, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_norm_equal_one_process(found: Any, kind: str) -> None:
    torch.manual_seed(7)
    model, data = runs.UserModel(), runs.UserData()
    samples = MICRO_BATCHES * (2 // KINDS[kind])
    pairs = [losses(model, data[number], 0, 1) for number in range(samples)]
    loss = torch.stack([total / count for total, count in pairs]).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert norm > CLIP, "nothing to clip"
    for rank in found:
        assert rank[kind] == pytest.approx([loss.item(), norm.item(), CLIP], abs=1e-5)
