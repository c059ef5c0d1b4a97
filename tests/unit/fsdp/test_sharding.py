"""Requirements on the process group, and models on the meta device, on one rank."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed.config import ConfigError
from mindspeed.fsdp import FsdpOptions, shard


@pytest.fixture
def group(request):
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("group", ["cuda:gloo"], indirect=True)
def test_offload_needs_a_cpu_backend(group):
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="start with --distributed-backend .*cpu:gloo$"):
        shard(model, FsdpOptions(offload_to_cpu=True))
    assert not isinstance(model.weight, DTensor)


class Critic(nn.Module):
    """Scores its input; may add a penalty on the gradient of the score to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, with_penalty):
        score = self.layers(x)
        return score.mean() + (penalty(score, x) if with_penalty else 0.0)


def penalty(score, x):
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return (slope.norm(dim=-1) - 1).square().mean()


@pytest.mark.parametrize("group", ["gloo"], indirect=True)
def test_a_gradient_penalty_within_forward_is_that_of_the_plain_model(group):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    plain, sharded = Critic(), Critic()
    shard(sharded, FsdpOptions())
    plain(x, True).backward()
    sharded(x, True).backward()
    for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad)


@pytest.mark.parametrize("group", ["gloo"], indirect=True)
@pytest.mark.parametrize("wrapped", [(), ("layers.{*}",)], ids=["the root", "parts"])
def test_gradients_of_gradients_through_units_raise(group, wrapped):
    """Without the error torch reads weights that were freed: it crashes."""
    model = Critic()
    shard(model, FsdpOptions(sub_modules_to_wrap=wrapped))
    x = torch.randn(5, 4, requires_grad=True)
    with pytest.raises(ConfigError, match="taken with create_graph=True through a sharded module"):
        penalty(model(x, False), x)


@pytest.mark.parametrize("group", ["gloo"], indirect=True)
def test_gradients_through_units_within_forward_raise(group):
    model = Critic()
    shard(model, FsdpOptions(sub_modules_to_wrap=("layers.{*}",)))
    x = torch.randn(5, 4, requires_grad=True)
    with pytest.raises(ConfigError, match="taken within a forward pass through a sharded module"):
        model(x, True)


class Opaque(nn.Linear):
    """Returns an object, which torch does not look into."""

    def forward(self, x):
        return SimpleNamespace(states=super().forward(x))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Opaque(4, 1)

    def forward(self, x):
        return self.part(x).states


@pytest.mark.parametrize("group", ["gloo"], indirect=True)
def test_units_that_hide_their_tensors_raise(group):
    x = torch.ones(2, 4)
    hidden, kept, root = Around(), Around(), Around()
    shard(hidden, FsdpOptions(sub_modules_to_wrap=("part",)))
    with pytest.raises(ConfigError, match="sub_modules_to_wrap: Opaque returns an object"):
        hidden(x)
    # Where weights stay gathered, nothing has to be gathered for the backward pass.
    shard(kept, FsdpOptions(sub_modules_to_wrap=("part",), reshard_after_forward=False))
    shard(root, FsdpOptions())
    for model in (kept, root):
        model(x).sum().backward()
        assert (model.part.bias.grad.full_tensor() == 2).all()
    with torch.no_grad():
        assert hidden(x).shape == (2, 1)


@pytest.mark.parametrize("group", ["gloo"], indirect=True)
def test_a_model_on_meta_is_sharded_without_weights(group):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    shard(model, FsdpOptions(sub_modules_to_wrap=("{0-1}",), ignored_modules=("2",)))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert isinstance(model[0].weight, DTensor) and not isinstance(model[2].weight, DTensor)
