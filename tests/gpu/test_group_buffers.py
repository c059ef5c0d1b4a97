"""Buffers of communicators on a GPU: the bound reaches NCCL."""

import os

import pytest
import torch

from mindspeed import device


@pytest.mark.parametrize(("mib", "channels"), [(1, 1), (12, 3), (300, 32)])
def test_channels_of_nccl(mib, channels, monkeypatch):
    monkeypatch.delenv("NCCL_BUFFSIZE", raising=False)
    assert device.current().group_options(mib).config.max_ctas == channels


def test_options_of_megatron_stay(monkeypatch):
    monkeypatch.setenv("NCCL_BUFFSIZE", str(1 << 20))
    given = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    found = device.current().group_options(5, given)
    assert found.config.max_ctas == 5 and found.is_high_priority_stream


def test_a_group_of_nccl_takes_them():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=store)
    try:
        group = torch.distributed.new_group([0], pg_options=device.current().group_options(12))
        x = torch.ones(3, device="cuda")
        torch.distributed.all_reduce(x, group=group)
        assert x.tolist() == [1, 1, 1]
    finally:
        torch.distributed.destroy_process_group()
