"""FSDP passes Megatron's check on a cpu; everything else finds the environment untouched."""

import os
from argparse import Namespace

import pytest

from mindspeed.compat.fsdp_arguments import wrap_validate_args


def megatron_check(args, defaults=None):
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    fsdp = args.use_torch_fsdp2 or args.use_megatron_fsdp
    assert (queues != "1") if fsdp else (queues == "1")
    return args, defaults


@pytest.mark.parametrize("flag", ["use_torch_fsdp2", "use_megatron_fsdp", None])
def test_the_check_passes(monkeypatch, flag):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    args = Namespace(use_torch_fsdp2=False, use_megatron_fsdp=False)
    if flag:
        setattr(args, flag, True)
    assert wrap_validate_args(megatron_check)(args, {"a": 1}) == (args, {"a": 1})
