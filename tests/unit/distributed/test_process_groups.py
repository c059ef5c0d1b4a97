"""Init, time-outs and teardown of the process groups of one rank."""

from datetime import timedelta

import pytest
import torch
from torch.distributed import distributed_c10d

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed import device
from mindspeed.config import ConfigError
from mindspeed.distributed.parallel_dims import ParallelDims
from mindspeed.distributed.process_groups import (
    destroy_distributed,
    init_distributed,
    init_model_parallel,
    set_collective_timeout,
)


@pytest.mark.parametrize("minutes", [0, 10**6 + 1, 10**20])
def test_a_timeout_that_no_clock_counts_is_rejected(minutes):
    match = f"--distributed-timeout-minutes {minutes}: give 1 to"
    with pytest.raises(ConfigError, match=match):
        init_distributed(device.current(), timeout_minutes=minutes)
    assert not torch.distributed.is_initialized()
    init_distributed(device.current(), timeout_minutes=1)
    try:
        with pytest.raises(ConfigError, match="give 1 to 1000000$"):
            set_collective_timeout(minutes)
    finally:
        destroy_distributed()


def test_groups_are_initialized_again_and_destroyed():
    from megatron.core import parallel_state

    for minutes in (3, 4):
        init_distributed(device.current(), timeout_minutes=minutes)
        init_model_parallel(ParallelDims(), timeout_minutes=minutes)
        assert parallel_state.get_tensor_model_parallel_world_size() == 1
        for group in distributed_c10d._world.pg_map:
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(minutes=minutes)
    destroy_distributed()
    assert not torch.distributed.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    destroy_distributed()
