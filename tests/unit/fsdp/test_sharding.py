"""Requirements on the process group, and models on the meta device, on one rank."""

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


@pytest.mark.parametrize("group", ["gloo"], indirect=True)
def test_a_model_on_meta_is_sharded_without_weights(group):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    shard(model, FsdpOptions(sub_modules_to_wrap=("{0-1}",), ignored_modules=("2",)))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert isinstance(model[0].weight, DTensor) and not isinstance(model[2].weight, DTensor)
