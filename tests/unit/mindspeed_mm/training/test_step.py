"""A step reports its losses without synchronizing with the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from mindspeed import device
from mindspeed.config import ConfigError
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed.fsdp import FsdpOptions, shard
from mindspeed_mm.training.callbacks import Callbacks, read_loss
from mindspeed_mm.training.step import FsdpStep, Reports

FAR = torch.device("meta")
COPYING = ("tensor", "as_tensor", "to")


class Copies(TorchFunctionMode):
    """Notes what copies from the host to the device, which waits for what the device does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = args[0] if args else None
        is_host = given.device != FAR if isinstance(given, torch.Tensor) else given is not None
        if func.__name__ in COPYING and is_host and result.device == FAR:
            self.found.append(str(func))
        return result


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(device, "current", lambda: SimpleNamespace(torch_device=FAR))
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)  # gloo has no such device
    yield
    dist.destroy_process_group()


class Sets(nn.Linear):
    """Leaves its result in an attribute: torch sees no tensor at which backward would begin."""

    def forward(self, x: torch.Tensor) -> None:
        self.result = super().forward(x)


class Around(nn.Module):
    """Reads the attribute of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Sets(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part(x)
        return self.part.result


def result_of(batches: Any, model: Any) -> Any:
    found = model(next(batches))
    return (model.result if found is None else found), torch.mean


@pytest.mark.parametrize(
    ("model", "needs", "wrapped", "error", "message"),
    [
        (Sets(2, 2), False, (), ConfigError, "gradients of Sets were not reduced over ranks"),
        (Sets(2, 2), True, (), ConfigError, "gradients of Sets were not reduced over ranks"),
        (
            Around(),
            True,
            ("part",),
            RuntimeError,
            "storage.*\n.*Sets returned no tensor with a gradient",
        ),
    ],
    ids=["the root", "the root with a trained input", "a part"],
)
def test_results_that_torch_does_not_see_are_explained(
    model: Any, needs: bool, wrapped: Any, error: Any, message: str
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard(model, FsdpOptions(sub_modules_to_wrap=wrapped))
        callbacks = Callbacks(lambda: None, lambda: None, result_of)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        dims = ParallelDims(world=1)
        step = FsdpStep(model, optimizer, callbacks, dims, clip=0.0, per_token=False)
        with pytest.raises(error, match=message):
            step.train(iter([torch.ones(1, 2, requires_grad=needs)]), lambda: False)
    finally:
        dist.destroy_process_group()


def test_a_last_loss_without_the_model_is_an_error() -> None:
    """The gradients of the micro-batches before it would stay unreduced, and count a step later."""

    def forward_step(batches: Any, model: Any) -> Any:
        x = next(batches)
        return (torch.zeros(1, requires_grad=True) if x is None else model(x)), torch.mean

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        shard(model, FsdpOptions())
        callbacks = Callbacks(lambda: None, lambda: None, forward_step)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        dims = ParallelDims(world=1, global_batch_size=2)
        step = FsdpStep(model, optimizer, callbacks, dims, clip=0.0, per_token=False)
        step.train(iter([None, torch.ones(1, 2)]), lambda: False)
        with pytest.raises(ConfigError, match="the last loss of the step does not depend on it"):
            step.train(iter([torch.ones(1, 2), None]), lambda: False)
    finally:
        dist.destroy_process_group()


def test_numbers_of_python_go_to_the_device_without_a_copy(one_rank: None) -> None:
    loss = torch.ones((), device=FAR)
    metrics = {"lm loss": loss, "share": 0.5, "pair": (loss, 3), "count": 2}
    with Copies() as copies:
        torch.as_tensor(1.0, device=FAR)
        assert copies.found, "this one is seen"
        copies.found.clear()
        reports = Reports(per_token=False)
        reports.add(read_loss((loss, 7, metrics)))
        totals = reports.reduce(loss, 1.0)
    assert totals.values.shape == (4 * 2 + 1 + 2,) and totals.values.is_meta
    assert not copies.found
