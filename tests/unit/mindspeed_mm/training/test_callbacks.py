"""Callbacks in the document's short form and in Megatron's full form; others are refused."""

from collections import OrderedDict, UserDict
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed.config import ConfigError
from mindspeed.fsdp import FsdpOptions, shard
from mindspeed_mm.training.callbacks import Callbacks, move_to_device, read_loss

COUNTS = (40, 8, 4)
LOADERS = ("train", None, None)


def make(model: Any = None, data: Any = None, step: Any = None) -> Callbacks:
    return Callbacks(model, data, step)


def test_model_providers() -> None:
    taken: list[Any] = []

    def anything(*args: Any, **kwargs: Any) -> nn.Module:
        taken.append(kwargs)
        return nn.Linear(1, 1)

    def megatron(pre_process: bool = False, post_process: bool = False) -> nn.Module:
        taken.append((pre_process, post_process))
        return nn.Linear(1, 1)

    for provider in (anything, megatron, lambda: nn.Linear(1, 1), partial(megatron)):
        assert isinstance(make(model=provider).model(), nn.Module)
    assert taken == [{"pre_process": True, "post_process": True}, (True, True), (True, True)]
    with pytest.raises(ConfigError, match="model_provider returned None"):
        make(model=lambda: None).model()


def test_data_providers() -> None:
    taken: list[Any] = []

    def megatron(train_val_test_num_samples: Any, vp_stage: Any = None) -> Any:
        taken.append(train_val_test_num_samples)
        return list(LOADERS)

    assert make(data=megatron).datasets(COUNTS) == LOADERS
    assert make(data=lambda: LOADERS).datasets(COUNTS) == LOADERS
    assert taken == [COUNTS]
    with pytest.raises(ConfigError, match="return three data loaders"):
        make(data=lambda: "one").datasets(COUNTS)


def test_loss_functions() -> None:
    loss = torch.tensor(3.0, requires_grad=True)
    bare = read_loss(loss)
    assert bare.value is not None and bare.tokens is None and bare.logs == {"loss": loss.detach()}
    pair = read_loss((loss, {"a": 1}))
    assert pair.tokens is None and pair.logs == {"a": 1}
    full = read_loss((loss, 5, {"a": (3.0, 5)}))
    assert full.tokens is not None and full.tokens.item() == 5
    assert read_loss(loss[None]).value.shape == ()


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (None, "loss_func returned None"),
        (torch.ones(2), "a tensor of shape \\(2,\\) as loss"),
        ((torch.ones(()), 3), "a int as metrics"),
        ((torch.ones(()),), "a tuple of 1"),
    ],
)
def test_other_losses_are_refused(result: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_loss(result)


def test_forward_steps() -> None:
    def forward_step(data_iterator: Any, model: Any) -> Any:
        return model * next(data_iterator), lambda output: output

    assert make(step=forward_step).loss(iter([torch.tensor(2.0)]), 3).value.item() == 6
    with pytest.raises(ConfigError, match="return the output and the loss function"):
        make(step=lambda batches, model: torch.ones(())).loss(iter([]), None)


def test_batches_keep_their_kind_on_the_way_to_the_device() -> None:
    class Named(NamedTuple):
        image: torch.Tensor
        names: list[str]

    named = move_to_device(Named(torch.ones(2), ["a"]), torch.bfloat16)
    assert isinstance(named, Named) and named.image.dtype == torch.bfloat16 and named.names == ["a"]
    for kind in (dict, OrderedDict, UserDict):  # processors of transformers return a UserDict
        batch = kind({"x": [torch.ones(2)], "n": torch.arange(2)})
        assert move_to_device(batch, torch.bfloat16) is batch
        assert batch["x"][0].dtype == torch.bfloat16 and batch["n"].dtype == torch.int64


@pytest.fixture
def sharded() -> Iterator[nn.Module]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Linear(3, 3)
    shard(model, FsdpOptions())
    yield model
    dist.destroy_process_group()


def test_sharded_weights_outside_of_forward_are_explained(sharded: Any) -> None:
    """As torch itself says it: no text of ours stands in for it."""

    def step(data: Any, model: Any) -> Any:
        return torch.nn.functional.linear(torch.ones(2, 3), model.weight), torch.sum

    with pytest.raises(RuntimeError, match="DTensor.*\n.*call the model itself, not another"):
        make(step=step).loss(iter([]), sharded)


def test_losses_of_sharded_weights_are_refused(sharded: Any) -> None:
    def step(data: Any, model: Any) -> Any:
        penalty = sum(weight.square().sum() for weight in model.parameters())
        return model(torch.ones(2, 3)).mean(), lambda output: output + penalty

    with pytest.raises(ConfigError, match="computed from sharded weights.*give --weight-decay"):
        make(step=step).loss(iter([]), sharded)
